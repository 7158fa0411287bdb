"""A drafter that starts from another one: the same drafter, or a refusal field by field."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafting import TAPS, load_tiny_target, make_doc, run_blocks, tiny_drafter
from paceline.drafter.build import drafter_config
from paceline.drafter.checkpoint import save_drafter
from paceline.drafter.dflash import DFlash
from paceline.drafter.vocabulary import DraftVocabulary
from paceline.drafter.warm_start import check_source, read_source, start_from, warm_config
from paceline.durable.errors import RecipeError, ShardDamaged, UserError
from paceline.recipe.fingerprint import digest_file
from paceline.recipe.schema import DrafterRecipe

RECIPE = DrafterRecipe(layers=2, block_size=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def source(target, tmp_path_factory) -> Path:
    return save(tiny_drafter(target), tmp_path_factory.mktemp("source"))


def save(drafter: DFlash, folder: Path) -> Path:
    save_drafter(drafter, folder)
    sums = {name: digest_file(folder / name) for name in ("model.safetensors", "config.json")}
    (folder / "checksums.json").write_text(json.dumps(sums))
    return folder


def config_of(folder, target, recipe=RECIPE, *, taps=TAPS, **spec):
    return warm_config(
        read_source(folder).config,
        folder,
        recipe,
        replace(target.spec, **spec),
        taps,
        template_digest="",
        template_args={},
    )


def refusal(*arguments, **keywords) -> str:
    with pytest.raises(RecipeError) as caught:
        config_of(*arguments, **keywords)
    return str(caught.value)


def test_it_starts_as_the_source_bit_for_bit(source, target):
    config, notes = config_of(source, target)
    assert notes == ()
    old = read_source(source)
    drafter = start_from(old, config)
    assert config == old.config
    assert all(p.dtype == torch.float32 and p.requires_grad for p in drafter.parameters())
    doc = make_doc(target, 24, answer_from=4)
    given = [run_blocks(d, target, doc, [6, 11, 20]) for d in (old, drafter)]
    assert torch.equal(given[0], given[1])
    for name, value in drafter.state_dict().items():
        assert value.data_ptr() != old.state_dict()[name].data_ptr(), "a copy, not the source's"


def test_a_narrower_source_becomes_fp32(source, target, tmp_path):
    save(read_source(source).bfloat16(), tmp_path)
    config, _ = config_of(tmp_path, target)
    drafter = start_from(read_source(tmp_path), config)
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("recipe", "spec", "taps", "expected"),
    [
        (replace(RECIPE, layers=3), {}, TAPS, "drafter.layers: 2 -> 3"),
        (RECIPE, {}, (1, 2, 4), "extract.taps: [1, 2, 3] -> [1, 2, 4]"),
        (RECIPE, {"hidden_size": 64}, TAPS, "hidden_size (of the target): 32 -> 64"),
        (RECIPE, {"num_heads": 8}, TAPS, "num_heads (of the target): 4 -> 8"),
        (RECIPE, {"num_layers": 8}, TAPS, "target_num_layers (of the target): 6 -> 8"),
        (RECIPE, {"vocab_size": 384}, TAPS, "vocab_size (of the target): 320 -> 384"),
        (replace(RECIPE, mask_token_id=301), {}, TAPS, "drafter.mask_token_id: 300 -> 301"),
        (replace(RECIPE, draft_vocab=50), {}, TAPS, "drafter.draft_vocab: None -> 50"),
        (
            replace(RECIPE, in_block_mask="causal"),
            {},
            TAPS,
            "drafter.in_block_mask: 'bidirectional' -> 'causal'",
        ),
        (
            replace(RECIPE, layer_types=("full", "sliding")),
            {},
            TAPS,
            "drafter.layer_types: ['full', 'full'] -> ['full', 'sliding']",
        ),
        (
            RECIPE,
            {"rope": {"rope_type": "default", "rope_theta": 5.0}},
            TAPS,
            "'rope_theta': 5.0",
        ),
    ],
)
def test_another_shape_is_refused_by_name(source, target, recipe, spec, taps, expected):
    message = refusal(source, target, recipe, taps=taps, **spec)
    assert expected in message
    assert str(source) in message


def test_every_difference_is_listed(source, target):
    lines = refusal(source, target, replace(RECIPE, layers=5), taps=(0, 1)).splitlines()
    assert [line.strip().partition(":")[0] for line in lines[1:-1]] == [
        "drafter.layers",
        "extract.taps",
        "drafter.layer_types",
    ]


def test_what_has_no_effect_is_no_difference(source, target):
    recipe = replace(RECIPE, layer_types=("full", "full"), sliding_window=9, mask_token_id=300)
    config, notes = config_of(
        source, target, replace(recipe, sliding_in_block_mask="bidirectional")
    )
    assert notes == ()
    assert config.mask_token_id == 300


def test_another_target_block_or_template_is_noted(source, target):
    config, notes = config_of(
        source, target, replace(RECIPE, block_size=8), identity="f" * 32, max_position=1024
    )
    assert config.block_size == 8
    assert config.target_identity == "f" * 32
    assert config.max_position == 1024
    assert "another target" in notes[0]
    assert target.spec.identity in notes[0]
    assert "blocks of 4, here they have 8" in notes[1]
    assert len(notes) == 2
    drafter = start_from(read_source(source), config)
    doc = make_doc(target, 24, answer_from=4)
    assert run_blocks(drafter, target, doc, [6]).shape == (1, 7, 32)
    _, notes = warm_config(
        read_source(source).config,
        source,
        RECIPE,
        target.spec,
        TAPS,
        template_digest="0" * 32,
        template_args={},
    )
    assert "another chat template" in notes[0]


def test_longer_positions_matter_where_the_rope_is_scaled(source, target, tmp_path):
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 256,
    }
    old = read_source(source)
    config = replace(old.config, rope=rope)
    save(start_from(old, config), tmp_path)
    assert config_of(tmp_path, target, rope=rope)[1] == ()
    assert "max_position (of the target): 512 -> 1024" in refusal(
        tmp_path, target, rope=rope, max_position=1024
    )


def test_another_convention_of_layer_ids_is_translated(source, target, tmp_path):
    old = read_source(source)
    theirs = replace(old.config, layer_convention="input_of_layer", taps=(2, 3, 4))
    drafter = DFlash(theirs)
    drafter.load_state_dict(old.state_dict())
    save(drafter, tmp_path)
    config, notes = config_of(tmp_path, target)
    assert (config.taps, config.layer_convention, notes) == (TAPS, "output_after_layer", ())
    save(DFlash(replace(theirs, layer_convention="from the top")), tmp_path)
    with pytest.raises(ShardDamaged, match="layer_convention"):
        config_of(tmp_path, target)


@pytest.mark.parametrize("asked", [None, 4])
def test_the_vocabulary_of_the_source_is_kept(source, target, tmp_path, asked):
    old = read_source(source)
    small = DFlash(replace(old.config, draft_vocab_size=4), DraftVocabulary.of([0, 5, 9, 15], 320))
    small.load_state_dict(old.state_dict(), strict=False)
    save(small, tmp_path)
    config, _ = config_of(tmp_path, target, replace(RECIPE, draft_vocab=asked))
    drafter = start_from(read_source(tmp_path), config)
    assert drafter.vocabulary.ids.tolist() == [0, 5, 9, 15]
    assert "drafter.draft_vocab: 4 -> 6" in refusal(
        tmp_path, target, replace(RECIPE, draft_vocab=6)
    )


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("harm", ["flip", "missing", "empty"])
def test_a_damaged_source_is_refused(source, tmp_path, name, harm):
    save(read_source(source), tmp_path)
    path = tmp_path / name
    data = bytearray(path.read_bytes())
    if harm == "missing":
        path.unlink()
    else:
        data[-3] ^= 4
        path.write_bytes(b"" if harm == "empty" else data)
    for read in (read_source, check_source):
        with pytest.raises(ShardDamaged, match=name.replace(".", r"\.")):
            read(tmp_path)


def test_a_source_without_checksums_is_judged_by_its_tensors(source, tmp_path):
    save_drafter(read_source(source), tmp_path)
    assert read_source(tmp_path).config == read_source(source).config
    assert check_source(tmp_path) == check_source(source) == read_source(source).config
    (tmp_path / "model.safetensors").write_bytes(b"")
    for read in (read_source, check_source):
        with pytest.raises(ShardDamaged, match="cannot be read"):
            read(tmp_path)
        with pytest.raises(UserError, match="no drafter here"):
            read(tmp_path / "nowhere")


def test_a_field_that_may_differ_is_one_that_exists(target):
    """All others are compared, those of later versions included."""
    from paceline.drafter.warm_start import _FREE

    config = drafter_config(
        RECIPE, target.spec, TAPS, mask_token_id=300, template_digest="", template_args={}
    )
    names = {field.name for field in dataclasses.fields(config)}
    assert names >= _FREE
