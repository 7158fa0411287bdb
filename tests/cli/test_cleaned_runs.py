"""A finished run whose features were cleaned away is still finished."""

from paceline.cli.main import main
from paceline.recipe.run_dir import RunDir
from tiny_run import tiny_project


def test_a_run_goes_on_without_the_features_that_were_cleaned_away(tmp_path, capsys):
    recipe = tiny_project(tmp_path)
    run = RunDir(tmp_path / "run")
    command = ["run", str(recipe), "--run", str(run.root)]
    assert main(command) == 0
    result = (run.score / "result.json").read_bytes()
    assert main(["clean", str(run.root), "--features", "--yes"]) == 0
    assert not list(run.features.glob("*.safetensors"))
    capsys.readouterr()
    assert main(command) == 0
    said = capsys.readouterr().out
    assert said.count("its features were cleaned away") == 2
    assert not list(run.features.glob("*.safetensors")), "they were made again for nobody"
    assert (run.score / "result.json").read_bytes() == result
    # The stage alone does what it is asked for.
    assert main(["extract", "--run", str(run.root)]) == 0
    assert list(run.features.glob("*.safetensors"))
    assert main(command) == 0
