"""Why one row cannot be used; raised by whatever part finds the reason."""

from paceline.durable.errors import DataError


class RowRejected(DataError):
    """One row cannot be used; `prepare` writes it to the quarantine and goes on."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        """Reason code, snake case; counted in the report."""
        self.detail = detail
        """What exactly was wrong, in words."""


class TemplateRejected(RowRejected):
    """The tokenizer's chat template refuses these turns."""

    def __init__(self, detail: str) -> None:
        super().__init__("template_rejected", detail)
