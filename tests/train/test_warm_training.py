"""Training from a drafter that was trained before: it goes on from that one's own τ."""

import shutil
from dataclasses import replace

import pytest

from paceline.drafter import warm_start
from paceline.drafter.checkpoint import load_drafter, save_drafter
from paceline.drafter.dflash import DFlash
from paceline.drafter.vocabulary import DraftVocabulary
from paceline.durable.errors import Interrupted, RecipeChanged, RecipeError, ShardDamaged
from paceline.train import stage
from paceline.train.checkpoint import read_state
from paceline.train.start import check_warm_start
from tiny_models import IM_END
from training_runs import events, stop_after


@pytest.fixture
def trained(fresh_run):
    """A run with a drafter of a reduced vocabulary, and that drafter's folder."""
    recipe, run_dir = fresh_run()
    recipe = replace(recipe, drafter=replace(recipe.drafter, draft_vocab=60))
    report = stage.run(recipe, run_dir)
    return recipe, run_dir.checkpoints / report.numbers["best"]


def warm(recipe, folder, **changes):
    return replace(recipe, drafter=replace(recipe.drafter, warm_start=str(folder), **changes))


def test_step_0_is_the_source_to_the_last_digit(trained, fresh_run):
    recipe, folder = trained
    _, run_dir = fresh_run()
    report = stage.run(warm(recipe, folder, draft_vocab=None), run_dir)
    first = events(run_dir, "evaluation")[0]
    assert first["step"] == 0
    assert first["simulated_tau"] == read_state(folder).tau
    source, mine = load_drafter(folder), load_drafter(run_dir.checkpoints / report.numbers["best"])
    assert mine.config == source.config
    assert mine.vocabulary.ids.tolist() == source.vocabulary.ids.tolist()
    assert report.numbers["draft_vocabulary"]["size"] == 60
    assert f"started from {folder}" in report.lines
    assert stage.run(warm(recipe, folder, draft_vocab=None), run_dir).skipped


def test_another_block_size_is_noted_and_trained(trained, fresh_run):
    recipe, folder = trained
    _, run_dir = fresh_run()
    changed = warm(recipe, folder, block_size=6)
    (note,) = check_warm_start(changed)
    report = stage.run(changed, run_dir)
    assert "blocks of 4, here they have 6" in note
    assert note in report.lines
    assert report.numbers["warm_start"]["notes"] == [note]
    assert load_drafter(run_dir.checkpoints / report.numbers["best"]).config.block_size == 6


def test_what_does_not_fit_is_refused_before_any_work(trained, fresh_run):
    recipe, folder = trained
    for changes, expected in (
        ({"layers": 2}, "drafter.layers: 1 -> 2"),
        ({"draft_vocab": 61}, "drafter.draft_vocab: 60 -> 61"),
        ({"mask_token_id": 301}, "drafter.mask_token_id: 259 -> 301"),
    ):
        _, run_dir = fresh_run()
        for refuse in (check_warm_start, lambda r, run=run_dir: stage.run(r, run)):
            with pytest.raises(RecipeError) as caught:
                refuse(warm(recipe, folder, **changes))
            assert expected in str(caught.value)
        assert not list(run_dir.checkpoints.glob("step_*"))


def test_a_mask_token_that_occurs_is_refused(trained, fresh_run, tmp_path):
    """Pitfall 21 again: the source's corpus did not have it, this one does."""
    recipe, folder = trained
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "checksums.json").unlink()
    config = other / "config.json"
    config.write_text(config.read_text().replace('"mask_token_id": 259', '"mask_token_id": 65'))
    _, run_dir = fresh_run()
    with pytest.raises(RecipeError, match="has the mask token 65, which occurs in this corpus"):
        stage.run(warm(recipe, other), run_dir)


def test_a_damaged_source_is_refused_before_any_work(trained, fresh_run):
    recipe, folder = trained
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    _, run_dir = fresh_run()
    for refuse in (check_warm_start, lambda r: stage.run(r, run_dir)):
        with pytest.raises(ShardDamaged, match="its checksum does not hold"):
            refuse(warm(recipe, folder))


def test_another_source_is_another_training(trained, fresh_run, tmp_path):
    recipe, folder = trained
    _, run_dir = fresh_run()
    stage.run(warm(recipe, folder), run_dir)
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    assert stage.run(warm(recipe, moved), run_dir).skipped, "its content counts, not its place"
    other = next(p for p in sorted(folder.parent.glob("step_*")) if p != folder)
    with pytest.raises(RecipeChanged, match=r"warm_start\.weights"):
        stage.run(warm(recipe, other), run_dir)
    with pytest.raises(RecipeChanged, match=r"warm_start\.weights"):
        stage.run(recipe, run_dir)


def test_end_tokens_that_the_source_cannot_propose_are_warned_of(
    trained, fresh_run, tmp_path, caplog
):
    recipe, folder = trained
    old = load_drafter(folder)
    assert IM_END in old.vocabulary.ids.tolist()
    ids = [i for i in range(256) if i not in old.vocabulary.ids.tolist()][:1]
    ids += [i for i in old.vocabulary.ids.tolist() if i != IM_END]
    other = DFlash(old.config, DraftVocabulary.of(ids, old.config.vocab_size))
    weights = {k: v for k, v in old.state_dict().items() if k not in ("d2t", "t2d")}
    other.load_state_dict(weights, strict=False)
    save_drafter(other, tmp_path / "source")
    _, run_dir = fresh_run()
    caplog.clear()
    stage.run(warm(recipe, tmp_path / "source"), run_dir)
    (told,) = [r for r in caplog.records if "end token" in r.getMessage()]
    assert told.levelname == "WARNING"
    assert told.getMessage().startswith(
        f"the draft vocabulary lacks the end token {IM_END} of this target: the last round of "
        "every answer that ends with it is lost."
    )
    caplog.clear()
    _, run_dir = fresh_run()
    stage.run(warm(recipe, folder), run_dir)
    assert "end token" not in caplog.text


def test_the_weights_of_the_source_are_loaded_once_and_only_for_the_first_step(
    trained, fresh_run, monkeypatch
):
    recipe, folder = trained
    loaded = []

    def load(path, **keywords):
        loaded.append(path)
        return load_drafter(path, **keywords)

    monkeypatch.setattr(warm_start, "load_drafter", load)
    _, run_dir = fresh_run()
    assert check_warm_start(warm(recipe, folder)) == ()
    assert not loaded
    undo = stop_after(monkeypatch, 3)
    with pytest.raises(Interrupted):
        stage.run(warm(recipe, folder), run_dir)
    undo()
    assert loaded == [folder]
    stage.run(warm(recipe, folder), run_dir)
    assert loaded == [folder]
