"""Charts of the score: τ by method, and acceptance by depth."""

from collections.abc import Iterable

from paceline.report.collect import RunView
from paceline.report.figure import (
    Chart,
    Figure,
    in_words,
    json_values,
    layout_of,
    method_styles,
)
from paceline.report.result import Acceptance, Number, Result
from paceline.report.text import DEEPEST
from paceline.watch.words import ordered


def result_charts(view: RunView) -> Iterable[Chart]:
    """All of them where there is a result, else none."""
    if view.result is None:
        return
    pooled = view.result.pooled
    yield _tau(view.result)
    slots = view.recipe.drafter.block_size - 1 if view.recipe else 0
    depths = max([slots, *(len(a.by_depth) for a in pooled.values())])
    reached = {name: _reached(a, depths) for name, a in pooled.items()}
    kept = {name: _kept(shares) for name, shares in reached.items()}
    yield _depth(view, "reached", "Rounds that reach a depth", reached, "share of all rounds")
    yield _depth(
        view, "kept", "Accepted, given the depth before", kept, "share of rounds that got there"
    )


def _tau(result: Result) -> Chart:
    names = ordered(result.pooled)
    pooled = [result.pooled[name] for name in names]
    bar = {"type": "bar", "orientation": "h", "y": names}
    traces: list[Figure] = [
        {
            **bar,
            "name": "the target's own token",
            "x": [1.0 if a.rounds else 0.0 for a in pooled],
            "marker": {"color": "var(--own)"},
            "hovertemplate": "1 token in each round",
        }
    ]
    deepest = max((len(a.by_depth) for a in pooled), default=0)
    for depth in range(1, min(deepest, DEEPEST) + 1):
        # The last colour stands for all that is deeper.
        last = depth == DEEPEST < deepest
        shares = [_share(a, depth, deepest if last else depth) for a in pooled]
        traces.append(
            {
                **bar,
                "name": f"depth {depth}{' and more' if last else ''}",
                "x": shares,
                "marker": {"color": f"var(--d{depth})"},
                "hovertemplate": "%{x:.3f} tokens a round",
            }
        )
    known = [(n, a) for n, a in zip(names, pooled, strict=True) if a.tau is not None]
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "τ with its 95 % interval",
            "y": [name for name, _ in known],
            "x": [a.tau for _, a in known],
            "marker": {"color": "var(--ink)", "size": 6},
            "error_x": {
                "type": "data",
                "symmetric": False,
                "array": [_gap(a.tau, a.tau_interval[1]) for _, a in known],
                "arrayminus": [_gap(a.tau_interval[0], a.tau) for _, a in known],
                "color": "var(--ink)",
                "thickness": 1.5,
                "width": 5,
            },
            "customdata": [[*a.tau_interval] for _, a in known],
            "hovertemplate": [
                "τ %{x:.3f}"
                + (" (%{customdata[0]:.3f} to %{customdata[1]:.3f})" if a.has_interval else "")
                for _, a in known
            ],
        }
    )
    layout = layout_of("tokens in each verification (τ)", "", height=150 + 44 * len(names))
    layout |= {"barmode": "stack", "bargap": 0.45, "hovermode": "closest"}
    layout["legend"] |= {"traceorder": "normal"}
    layout["yaxis"] |= {"autorange": "reversed", "showgrid": False, "type": "category"}
    layout["xaxis"] |= {"rangemode": "tozero"}
    layout["annotations"] = [
        {
            "x": max(a.tau or 0.0, a.tau_interval[1] or 0.0),
            "y": name,
            "text": f"<b>{a.tau:.2f}</b>",
            "showarrow": False,
            "xanchor": "left",
            "xshift": 8,
            "font": {"size": 14, "color": "var(--ink)"},
        }
        for name, a in known
    ]
    said = ", ".join(
        f"{name} {in_words(a.tau)}"
        + (
            f" (95 % interval {in_words(a.tau_interval[0])} to {in_words(a.tau_interval[1])})"
            if a.has_interval
            else ""
        )
        for name, a in known
    )
    return Chart(
        name="tau",
        title="Tokens in each verification of the target",
        figure={"data": traces, "layout": layout},
        label=f"Acceptance length τ by method: {said or 'no rounds'}. Plain decoding has 1.",
        caption=(
            "Plain decoding yields one token for each pass of the target. What a bar has beyond "
            "that was drafted and accepted, by depth in the draft."
        ),
    )


def _depth(
    view: RunView, name: str, title: str, shares: dict[str, list[Number]], what: str
) -> Chart:
    names = ordered(shares)
    styles = method_styles(view, names)
    depths = list(range(1, max((len(s) for s in shares.values()), default=0) + 1))
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": method,
            "x": depths,
            "y": json_values(shares[method]),
            **styles[method],
            "hovertemplate": "%{y:.1%}",
        }
        for method in names
    ]
    layout = layout_of("depth", what, height=300)
    layout["xaxis"] |= {"dtick": 1} if len(depths) <= 16 else {}
    layout["yaxis"] |= {"tickformat": ".0%", "rangemode": "tozero"}
    first = ", ".join(f"{m} {s[0]:.0%}" for m, s in shares.items() if s and s[0] is not None)
    return Chart(
        name=name,
        title=title,
        figure={"data": traces, "layout": layout},
        label=f"{title}, by depth and method. At depth 1: {first or 'nothing'}.",
    )


def _reached(acceptance: Acceptance, depths: int) -> list[Number]:
    if not acceptance.rounds:
        return [None] * depths
    return [*acceptance.by_depth, *[0.0] * (depths - len(acceptance.by_depth))]


def _kept(reached: list[Number]) -> list[Number]:
    kept: list[Number] = []
    for before, now in zip([1.0, *reached], reached, strict=False):
        kept.append(now / before if now is not None and before else None)
    return kept


def _share(acceptance: Acceptance, first: int, last: int) -> float:
    return sum(share or 0.0 for share in acceptance.by_depth[first - 1 : last])


def _gap(low: Number, high: Number) -> float:
    return 0.0 if low is None or high is None else max(0.0, high - low)
