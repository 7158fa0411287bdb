import pytest

from paceline.cli.run import _target_notes
from paceline.recipe.schema import CorpusRecipe, Recipe, TargetRecipe
from tiny_models import tiny_model


@pytest.mark.parametrize(("kind", "noted"), [("llama", False), ("qwen3_5", True)])
def test_what_score_would_refuse_is_said_before_the_work(tmp_path, kind, noted):
    target = tiny_model(kind, tmp_path)
    notes = _target_notes(Recipe(target=TargetRecipe(path=str(target))))
    assert any("linear" in note for note in notes) is noted
    if noted:
        assert "linear_attention" in notes[0]
        assert "`score`" in notes[0]


def test_samples_longer_than_the_target_reads_are_noted(tmp_path):
    target = TargetRecipe(path=str(tiny_model("llama", tmp_path)))
    [note] = _target_notes(Recipe(target=target, corpus=CorpusRecipe(max_length=513)))
    assert note.startswith("corpus.max_length: 513 is more than the target's 512 positions")
