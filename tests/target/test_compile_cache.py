import subprocess
import sys

import pytest
import torch

from paceline.target.compile_cache import compile_cache_environment, compile_cache_folder


def test_the_folder_is_named_by_versions_and_device(tmp_path):
    folder = compile_cache_folder(tmp_path)
    assert folder.parent == tmp_path
    assert f"torch-{torch.__version__}".replace("+", "-") in folder.name
    assert folder == compile_cache_folder(tmp_path)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("module", "name"), [("torch", "__version__"), ("transformers", "__version__")]
)
def test_another_version_is_another_folder(module, name, tmp_path, monkeypatch):
    before = compile_cache_folder(tmp_path)
    monkeypatch.setattr(sys.modules[module], name, "99.9")
    assert compile_cache_folder(tmp_path) != before


def test_names_that_read_alike_do_not_share_a_folder(tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch, "__version__", "2.13+cu1")
    one = compile_cache_folder(tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.13-cu1")
    assert compile_cache_folder(tmp_path) != one


def test_torch_s_compiler_keeps_its_kernels_there(tmp_path):
    """In a process of its own, as the compiler reads the environment of the process."""
    code = (
        "import sys; from pathlib import Path\n"
        "from paceline.target.compile_cache import use_compile_cache\n"
        "print(use_compile_cache(Path(sys.argv[1])))\n"
        "from torch._inductor.runtime.cache_dir_utils import cache_dir\n"
        "print(cache_dir())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    folder, used = done.stdout.split()
    assert used == compile_cache_environment(tmp_path / folder)["TORCHINDUCTOR_CACHE_DIR"]
