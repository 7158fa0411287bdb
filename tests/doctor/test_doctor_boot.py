"""A server that starts by itself at the next boot is found, whether it runs now or not."""

from pathlib import Path

import pytest

from checkout import ROOT
from doctor_worlds import unit, world_of
from paceline.doctor.checks import boot
from paceline.doctor.units import gpu_units
from tiny_run import tiny_project


def never(command):
    raise AssertionError(f"asked {command}")


@pytest.fixture
def root(tmp_path):
    unit(tmp_path, "ssh.service", "[Service]\nExecStart=/usr/sbin/sshd -D\n")
    return tmp_path


def names(root, home=None, run=never):
    return [u.name for u in gpu_units(root, home, run) or []]


@pytest.mark.parametrize(
    ("start", "why"),
    [
        ("/srv/venv/bin/vllm serve /models/x", "starts vllm"),
        ("/usr/bin/python3 -m sglang.launch_server --model x", "starts sglang"),
        ("/usr/local/bin/ollama serve", "starts ollama"),
        ("/srv/tritonserver/bin/tritonserver", "starts tritonserver"),
        ("/usr/bin/text-generation-launcher", "starts text-generation"),
        ("-/usr/bin/llama-server \\\n  -m x.gguf", "starts llama-server"),
        ("/usr/bin/docker run --rm \\\n    --gpus all tei", "says `ExecStart"),
    ],
)
def test_a_server_is_known_by_what_it_starts(root, start, why):
    unit(root, "serve.service", f"[Unit]\nDescription=x\n[Service]\nExecStart={start}\n")
    [found] = gpu_units(root, None, never) or []
    assert found.name == "serve.service"
    assert found.why.startswith(why)
    assert found.mend() == "sudo systemctl disable --now serve.service"


def test_a_unit_that_only_mentions_a_gpu_is_known_too(root):
    unit(root, "app.service", "[Service]\nEnvironment=CUDA_VISIBLE_DEVICES=0\nExecStart=/x/start\n")
    assert names(root) == ["app.service"]


def test_the_drivers_own_services_and_mere_descriptions_are_not(root):
    unit(root, "nvidia-persistenced.service", "[Service]\nExecStart=/usr/bin/nvidia-persistenced\n")
    unit(root, "doc.service", "[Unit]\nDescription=no CUDA here\n[Service]\nExecStart=/bin/x\n")
    unit(root, "off.service", "[Service]\n# ExecStart=/usr/bin/vllm\nExecStart=/bin/x\n")
    assert names(root) == []


def test_an_instance_is_read_from_its_template_and_additions_count(root):
    folder = root / "etc/systemd/system"
    (folder / "llm@.service").write_text("[Service]\nExecStart=/usr/bin/vllm serve %i\n")
    (folder / "multi-user.target.wants/llm@0.service").symlink_to(
        "/etc/systemd/system/llm@.service"
    )
    unit(root, "plain.service", "[Service]\nExecStart=/bin/x\n")
    (folder / "plain.service.d").mkdir()
    (folder / "plain.service.d/gpu.conf").write_text("[Service]\nEnvironment=NVIDIA_X=1\n")
    assert names(root) == ["llm@0.service", "plain.service"]


def test_a_users_own_services_are_found(root, tmp_path):
    wants = tmp_path / "home/.config/systemd/user/default.target.wants"
    wants.mkdir(parents=True)
    (wants.parent / "ollama.service").write_text("[Service]\nExecStart=/usr/bin/ollama serve\n")
    (wants / "ollama.service").symlink_to("../ollama.service")
    [found] = gpu_units(root, tmp_path / "home", never) or []
    assert found.is_users
    assert found.mend() == "systemctl --user disable --now ollama.service"


def test_a_link_to_nowhere_is_known_by_its_name(root):
    wants = root / "etc/systemd/system/multi-user.target.wants"
    (wants / "vllm.service").symlink_to("/gone/vllm.service")
    assert names(root) == ["vllm.service"]


def test_where_systemd_runs_it_is_asked_what_is_enabled_and_what_runs(root):
    (root / "run/systemd/system").mkdir(parents=True)
    (root / "usr/lib/systemd/system/vllm.service").write_text("[Service]\nExecStart=/x/vllm\n")
    asked = []

    def recorded(command):
        asked.append(command[1])
        if command[1] == "list-unit-files":
            return "ssh.service enabled enabled\nvllm.service enabled disabled\n"
        return "inactive\n"

    [found] = gpu_units(root, None, recorded) or []
    assert (found.name, found.is_running) == ("vllm.service", False)
    assert asked == ["list-unit-files", "is-active"]


def test_where_systemctl_fails_the_links_are_read(root):
    (root / "run/systemd/system").mkdir(parents=True)
    unit(root, "vllm.service", "[Service]\nExecStart=/x/vllm\n")
    [found] = gpu_units(root, None, lambda command: None) or []
    assert (found.name, found.is_running) == ("vllm.service", None)


def test_incident_another_server_starts_itself_at_boot(root, tmp_path_factory):
    recipe = tiny_project(tmp_path_factory.mktemp("boot"))
    unit(root, "vllm.service", "[Service]\nExecStart=/x/vllm\n")
    for overrides, severity in ((["target.device=cuda"], "warning"), ([], "note")):
        [found] = boot.check(world_of(recipe, *overrides, root=root))
        assert found.severity == severity
        assert found.what == "vllm.service starts at boot; it starts vllm"


def test_without_systemd_it_says_that_nothing_was_looked_at(tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    recipe = tiny_project(tmp_path_factory.mktemp("boot"))
    [found] = boot.check(world_of(recipe, root=empty))
    assert found.severity == "note"
    assert "no systemd" in found.what


def test_the_runs_own_service_is_as_it_should_be_and_another_runs_is_named(root, tmp_path_factory):
    """docs/paceline@.service waits for the driver, so it mentions a GPU."""
    recipe = tiny_project(tmp_path_factory.mktemp("boot"))
    text = (ROOT / "docs" / "paceline@.service").read_text()
    (root / "usr/lib/systemd/system/paceline@.service").write_text(text)
    wants = root / "etc/systemd/system/multi-user.target.wants"
    for name in ("mine", "other"):
        (wants / f"paceline@{name}.service").symlink_to("/usr/lib/systemd/system/paceline@.service")
    world = world_of(recipe, "target.device=cuda", root=root, run=Path("/srv/paceline/runs/mine"))
    mine, other = boot.check(world)
    assert (mine.severity, mine.what) == ("ok", "paceline@mine.service starts this run at boot")
    assert other.severity == "warning"
    assert other.what.startswith("paceline@other.service starts at boot; it says `ExecStartPre=")
    assert other.mend == "sudo systemctl disable --now paceline@other.service"
