import pytest

from paceline.cli.run import _target_notes
from tiny_models import tiny_model


@pytest.mark.parametrize(("kind", "noted"), [("llama", False), ("qwen3_5", True)])
def test_what_score_would_refuse_is_said_before_the_work(tmp_path, kind, noted):
    notes = _target_notes(tiny_model(kind, tmp_path))
    assert bool(notes) is noted
    if noted:
        assert "linear_attention" in notes[0]
        assert "`score`" in notes[0]
