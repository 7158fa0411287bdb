"""An evaluation's coverage and calibration come from the very pass that gives its tau."""

from drafting import tiny_drafter
from paceline.decode.calibration import TemperatureFit
from paceline.decode.slot_figures import SlotTally
from paceline.features.reader import FeatureReader
from paceline.recipe.run_dir import RunDir
from paceline.train.evaluate import depths_at_anchors


def test_figures_of_an_evaluation_agree_with_the_depths_that_it_accepts(world):
    _, root, target = world
    drafter = tiny_drafter(target).train()
    reader = FeatureReader(RunDir(root).features)

    def evaluate(**more):
        return depths_at_anchors(drafter, target.head, reader, range(12), anchors=8, seed=0, **more)

    depths = drafter.config.block_size - 1
    tally, fit = SlotTally(depths), TemperatureFit(depths)
    found = evaluate(observers=(tally, fit))
    assert found == evaluate(), "looking on changes nothing"
    assert drafter.training
    first, *deeper = tally.figures()
    chain = found["chain"]
    assert first.slots == len(chain) > 50
    assert first.covered[0] == sum(depth > 0 for depth in chain) / len(chain)
    assert all(figures.slots <= first.slots for figures in deeper)
    # A node at depth 1 in a tree of 16 is one of the 16 best tokens.
    assert sum(depth > 0 for depth in found["ddtree-16"]) / len(chain) <= first.covered[2]

    temperatures = fit.temperatures(least=1)
    after = SlotTally(depths, temperatures)
    tempered = evaluate(temperatures=temperatures, observers=(after,))
    assert tempered["chain"] == chain
    assert sum(f.nll for f in after.figures()) < sum(f.nll for f in tally.figures())
    assert [f.covered for f in after.figures()] == [f.covered for f in tally.figures()]
