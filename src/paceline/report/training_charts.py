"""Charts of the training: loss, learning rate, gradient norm, simulated τ."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.report.collect import RunView
from paceline.report.events import Training
from paceline.report.figure import Chart, in_words, json_values, layout_of, method_styles
from paceline.report.result import Number
from paceline.report.thin import POINTS, smooth, thin
from paceline.watch.words import counted, ordered


def training_charts(view: RunView) -> Iterable[Chart]:
    """Those that the events have data for."""
    training = view.training
    if training.steps:
        yield _loss(training)
        yield _small(
            "learning-rate", "Learning rate", training, training.learning_rate, "learning rate"
        )
        yield _small(
            "gradient-norm",
            "Gradient norm, before clipping",
            training,
            training.gradient_norm,
            "gradient norm",
        )
    evaluations = {step: tau for step, tau in sorted(training.evaluations.items()) if tau}
    if evaluations:
        yield _simulated(view, evaluations)


def _loss(training: Training) -> Chart:
    raw = thin(training.loss)
    count = len(training.steps)
    window = max(1, count // 40)
    steps = [training.steps[i] for i in raw]
    traces = [
        {
            "type": "scatter",
            "mode": "lines" if count > 1 else "markers",
            "name": "each step",
            "x": steps,
            "y": json_values(training.loss[i] for i in raw),
            "line": {"color": "var(--faint)", "width": 1},
            "marker": {"color": "var(--faint)"},
            "hovertemplate": "%{y:.4f}",
        }
    ]
    if window > 1:
        at = range(0, count, max(1, count // (POINTS // 4)))
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"mean of {window} steps",
                "x": [training.steps[i] for i in at],
                "y": json_values(smooth(training.loss, window, at)),
                "line": {"color": "var(--accent)", "width": 2.5},
                "hovertemplate": "%{y:.4f}",
            }
        )
    first, last = map(in_words, smooth(training.loss, window, (0, count - 1)))
    label = f"Loss over {counted(count, 'step')}: about {first} at the start and {last} at the end."
    layout = layout_of("step", "loss", height=340)
    return Chart(
        name="loss",
        title="Loss",
        figure={"data": traces, "layout": layout},
        label=label,
        caption=label,
    )


def _small(name: str, title: str, training: Training, values: Sequence[float], what: str) -> Chart:
    kept = thin(values)
    finite = [v for v in values if math.isfinite(v)]
    label = f"The {what} over {counted(len(training.steps), 'step')}" + (
        f": between {min(finite):.3g} and {max(finite):.3g}, at the end {finite[-1]:.3g}."
        if finite
        else ": the events have none."
    )
    trace = {
        "type": "scatter",
        "mode": "lines" if len(kept) > 1 else "markers",
        "name": what,
        "x": [training.steps[i] for i in kept],
        "y": json_values(values[i] for i in kept),
        "line": {"color": "var(--accent)", "width": 1.5},
        "marker": {"color": "var(--accent)"},
        "hovertemplate": "%{y:.4g}",
    }
    layout = layout_of("step", "", height=220, legend=False)
    layout["yaxis"] |= {"exponentformat": "e", "nticks": 5}
    return Chart(name=name, title=title, figure={"data": [trace], "layout": layout}, label=label)


def _simulated(view: RunView, evaluations: dict[int, dict[str, Number]]) -> Chart:
    names = ordered({name for tau in evaluations.values() for name in tau})
    styles = method_styles(view, names)
    steps = list(evaluations)
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": steps,
            "y": json_values(evaluations[step].get(name) for step in steps),
            **styles[name],
            "hovertemplate": "%{y:.3f}",
        }
        for name in names
    ]
    layout = layout_of("step", "simulated τ", height=340)
    last = evaluations[steps[-1]]
    said = ", ".join(f"{name} {in_words(last.get(name))}" for name in names)
    at = counted(len(steps), "evaluation")
    label = f"Simulated τ on validation samples at {at}; the last: {said}."
    caption = label
    best = _step_of(view.stages["train"].numbers.get("best"))
    if best is not None:
        line = {"color": "var(--muted)", "width": 1, "dash": "dot"}
        layout["shapes"] = [
            {
                "type": "line",
                "x0": best,
                "x1": best,
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "line": line,
            }
        ]
        caption += f" The dotted line is the checkpoint that was chosen, step {best:,}."
    return Chart(
        name="simulated",
        title="Simulated τ",
        figure={"data": traces, "layout": layout},
        label=label,
        caption=caption,
    )


def _step_of(best: Any) -> int | None:
    digits = str(best).removeprefix("step_")
    return int(digits) if digits.isdecimal() else None
