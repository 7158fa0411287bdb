"""Softmaxes of a chunk of logits, and gradients as sums of a few directions.

Every term's gradient towards a row of logits is a combination of the drafter's distribution q, q
times something, the target's p, and single entries. So a chunk's gradient is formed once, from
factors that the terms add up, in buffers that the next chunk uses again.
"""

import torch


class Workspace:
    """Buffers [rows, V] by name, made when first asked for and shared by all chunks."""

    def __init__(self, rows: int, like: torch.Tensor) -> None:
        self._rows, self._like = rows, like
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Uninitialised; what was in it before is lost."""
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._like.new_empty((self._rows, shape[1]))
            self._buffers[name] = buffer
        return buffer[: shape[0]]

    def dot(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Row-wise inner products [R, 1]."""
        product = torch.mul(one, other, out=self.take("product", one.shape))
        return product.sum(dim=-1, keepdim=True)


class Softmax:
    """softmax(x / T) of rows x whose largest entry is 0, and the gradient's part in it."""

    def __init__(
        self, x: torch.Tensor, temperature: float, space: Workspace, *, reuse: bool = False
    ) -> None:
        """`reuse` takes the place of x, which is gone then."""
        self._space, self._name = space, f"softmax {temperature}"
        buffer = x if reuse else space.take(self._name, x.shape)
        if temperature == 1.0:
            self.exponentials = torch.exp(x, out=buffer)
        else:
            self.exponentials = torch.mul(x, 1.0 / temperature, out=buffer).exp_()
        self.total = self.exponentials.sum(dim=-1, keepdim=True)
        self.log_total = self.total.log()
        self._even = torch.zeros_like(self.total)
        self._uneven: list[tuple[torch.Tensor, torch.Tensor]] = []

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Expectation of [R, V] under each row, [R, 1]."""
        return self._space.dot(self.exponentials, values) / self.total

    def add(self, factor: torch.Tensor) -> None:
        """Add `factor` [R, 1] times q to the gradient."""
        self._even += factor

    def add_times(self, values: torch.Tensor, factor: torch.Tensor) -> None:
        """Add `factor` [R, 1] times q times `values` [R, V], which must stay as they are."""
        self._uneven.append((values, factor))

    def slopes(self) -> torch.Tensor:
        """The gradient's part, in the place of the exponentials."""
        even = self._even / self.total
        if not self._uneven:
            return self.exponentials.mul_(even)
        factors = self._space.take("product", self.exponentials.shape)
        (values, factor), *rest = self._uneven
        torch.addcmul(even, values, factor / self.total, out=factors)
        for values, factor in rest:
            factors.addcmul_(values, factor / self.total)
        return self.exponentials.mul_(factors)


class Targets:
    """The target's distribution in rows: `rows` of them are distinct, `inverse` tells which."""

    def __init__(
        self,
        logits: torch.Tensor,
        inverse: torch.Tensor,
        space: Workspace,
        *,
        columns: torch.Tensor | None,
    ) -> None:
        """`logits` [U, V] are used up; `columns` int64 [K] are those that the drafter proposes."""
        self._space, self._inverse = space, inverse
        whole = None
        if columns is not None:
            whole = logits.logsumexp(dim=-1, keepdim=True)
            shape = torch.Size((logits.shape[0], columns.numel()))
            logits = torch.index_select(logits, 1, columns, out=space.take("columns", shape))
        top = logits.amax(dim=-1, keepdim=True)
        self._x = logits.sub_(top)
        self._whole = None if whole is None else whole - top
        self._known: dict[float, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def at(self, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities [R, K] over the proposed tokens, and their negative entropies [R, 1]."""
        probabilities, entropy, _ = self._at(temperature)
        return probabilities, entropy

    def log_at(self, temperature: float, out: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [R, K] over the proposed tokens, into `out`."""
        _, _, log_total = self._at(temperature)
        x = torch.index_select(self._x, 0, self._inverse, out=out)
        return x.mul_(1.0 / temperature).sub_(log_total)

    def mass(self) -> torch.Tensor | float:
        """What the target gives to the proposed tokens together, [R, 1]."""
        if self._whole is None:
            return 1.0
        _, _, log_total = self._at(1.0)
        return (log_total - self._whole[self._inverse]).exp()

    def _at(self, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if temperature not in self._known:
            distinct = Softmax(self._x, temperature, _Prefixed(self._space, "target "))
            entropy = distinct.mean(self._x) / temperature - distinct.log_total
            distinct.exponentials.div_(distinct.total)
            shape = torch.Size((self._inverse.numel(), self._x.shape[1]))
            rows = torch.index_select(
                distinct.exponentials,
                0,
                self._inverse,
                out=self._space.take(f"target rows {temperature}", shape),
            )
            inverse = self._inverse
            self._known[temperature] = (rows, entropy[inverse], distinct.log_total[inverse])
        return self._known[temperature]


class _Prefixed(Workspace):
    """The same buffers, under names of their own."""

    def __init__(self, space: Workspace, prefix: str) -> None:
        self._inner, self._prefix = space, prefix

    def take(self, name: str, shape: torch.Size) -> torch.Tensor:
        return self._inner.take(name if name == "product" else self._prefix + name, shape)
