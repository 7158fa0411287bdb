"""Another server holds the GPUs: process, unit, user and bytes are named before anything loads."""

import os
import pwd
from types import SimpleNamespace

import pytest

from doctor_worlds import GIB, RecordedGpus, fake_machine, fake_process, only, world_of
from paceline.doctor.checks import gpus
from paceline.doctor.gpu_probe import (
    Gpu,
    GpuHolder,
    HereProbe,
    NvmlProbe,
    SmiProbe,
    parse_smi,
)
from paceline.doctor.processes import owner_of
from tiny_run import tiny_project

ON_GPU = ("target.device=cuda:0",)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny_project(tmp_path_factory.mktemp("gpus"))


def check(recipe, root, probe, *overrides):
    return list(gpus.check(world_of(recipe, *overrides, root=root, gpus=probe)))


def holder(pid=4711, used=100 * GIB):
    return GpuHolder(gpu=0, pid=pid, used=used)


def test_incident_another_server_holds_a_gpu_and_is_named_with_unit_user_and_bytes(
    recipe, tmp_path
):
    root = fake_machine(tmp_path)
    fake_process(root, 4711)
    [found] = only(check(recipe, root, RecordedGpus(holder(), used=101 * GIB), *ON_GPU), "warning")
    assert found.what == (
        "GPU 0: 107.4 GB of 150.3 GB are held by process 4711 (vllm serve model), "
        "unit vllm.service, user root"
    )
    assert found.mend == "sudo systemctl disable --now vllm.service"


def test_it_is_an_error_where_the_target_does_not_fit_beside_it(recipe, tmp_path):
    root = fake_machine(tmp_path)
    fake_process(root, 4711)
    probe = RecordedGpus(holder(used=140 * GIB - 100), used=140 * GIB - 100)
    [found] = only(check(recipe, root, probe, *ON_GPU), "error")
    assert "the target alone takes" in found.why
    assert found.why.endswith("100 B are free")


def test_it_is_a_note_where_the_recipe_uses_no_gpu(recipe, tmp_path):
    root = fake_machine(tmp_path)
    fake_process(root, 4711)
    found = check(recipe, root, RecordedGpus(holder(), used=101 * GIB))
    assert [f.severity for f in found] == ["note"]


def test_a_holder_outside_this_container_is_said_to_be_so(recipe, tmp_path):
    root = fake_machine(tmp_path, is_container=True)
    [found] = only(check(recipe, root, RecordedGpus(holder(), used=101 * GIB), *ON_GPU), "warning")
    assert found.what.endswith("held by process 4711, outside this container")
    assert found.mend.startswith("on the machine itself: ")


def test_a_process_here_with_the_number_of_one_outside_is_not_accused(recipe, tmp_path):
    root = fake_machine(tmp_path, is_container=True)
    fake_process(root, 4711, command="sleep 1000", has_gpu=False)
    [found] = only(check(recipe, root, RecordedGpus(holder(), used=101 * GIB), *ON_GPU), "warning")
    assert "outside this container" in found.what
    assert "sleep" not in found.what


def test_memory_that_no_listed_process_holds_is_a_finding(recipe, tmp_path):
    root = fake_machine(tmp_path, is_container=True)
    [found] = only(check(recipe, root, RecordedGpus(used=71 * GIB), *ON_GPU), "warning")
    assert "76.2 GB of 150.3 GB are in use by no process that the driver names here" in found.what


def test_the_drivers_own_memory_is_no_finding(recipe, tmp_path):
    found = check(recipe, fake_machine(tmp_path), RecordedGpus(used=500 << 20), *ON_GPU)
    assert [f.severity for f in found] == ["ok"]


def test_a_process_that_has_ended_or_is_hidden_is_not_said_to_be_outside(recipe, tmp_path):
    [found] = only(
        check(recipe, fake_machine(tmp_path), RecordedGpus(holder(), used=101 * GIB), *ON_GPU),
        "warning",
    )
    assert "process 4711, which this user cannot see" in found.what


@pytest.mark.parametrize(
    ("cgroup", "words", "mend"),
    [
        (
            "/user.slice/user-1000.slice/user@1000.service/app.slice/ollama.service",
            "user unit ollama.service",
            "systemctl --user disable --now ollama.service",
        ),
        (
            f"/system.slice/docker-{'ab' * 32}.scope",
            "container abababababab",
            "docker update --restart=no abababababab && docker stop abababababab",
        ),
        ("/user.slice/user-0.slice/session-3.scope", "(vllm serve model), user root", "kill 4711"),
        ("/user.slice/user-1000.slice/user@1000.service/init.scope", "user root", "kill 4711"),
    ],
)
def test_units_containers_and_sessions_are_told_apart(tmp_path, monkeypatch, cgroup, words, mend):
    monkeypatch.setattr(os, "getuid", lambda: 0)
    root = fake_machine(tmp_path)
    fake_process(root, 4711, cgroup=cgroup)
    owner = owner_of(4711, root)
    assert words in owner.in_words()
    assert owner.mend() == mend


def test_the_process_of_another_user_needs_sudo(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    root = fake_machine(tmp_path)
    fake_process(root, 4711, cgroup="/user.slice/session-3.scope")
    assert owner_of(4711, root).mend() == "sudo kill 4711"


def test_cgroups_of_the_first_version_are_read_too(tmp_path):
    root = fake_machine(tmp_path)
    fake_process(root, 4711)
    (root / "proc/4711/cgroup").write_text(
        "3:memory:/x\n2:cpu:/y\n1:name=systemd:/system.slice/sglang.service\n0::/\n"
    )
    assert owner_of(4711, root).unit == "sglang.service"


def test_a_real_process_is_described():
    owner = owner_of(os.getpid())
    assert owner.where == "here"
    assert owner.user == pwd.getpwuid(os.getuid()).pw_name
    assert "python" in owner.command or "pytest" in owner.command


def test_this_run_itself_is_not_accused(recipe, tmp_path):
    from paceline.durable.owner import owned

    root = fake_machine(tmp_path)
    fake_process(root, 4711, parent=os.getpid())
    run = tmp_path / "run"
    with owned(run, "paceline extract"):
        world = world_of(
            recipe, *ON_GPU, root=root, run=run, gpus=RecordedGpus(holder(), used=101 * GIB)
        )
        found = list(gpus.check(world))
    assert [f.severity for f in found] == ["note"]
    assert "this run itself" in found[0].what


def test_a_gpu_that_is_not_there_is_an_error(recipe, tmp_path):
    root = fake_machine(tmp_path)
    found = check(recipe, root, RecordedGpus(count=2), "target.devices=[0,1,2]")
    [error] = only(found, "error")
    assert error.what == "target.devices: GPU 2 is not there; 2 GPUs can be used"
    assert error.mend == "--set target.devices='[0, 1]'"


def test_hidden_gpus_are_not_counted(recipe, tmp_path):
    world = world_of(
        recipe, "target.device=cuda:1", root=fake_machine(tmp_path), gpus=RecordedGpus(count=2),
        environ={"CUDA_VISIBLE_DEVICES": "1"},
    )  # fmt: skip
    found = list(gpus.check(world))
    assert [f.what for f in only(found, "error")] == [
        "target.device: GPU 1 is not there; 1 GPU can be used"
    ]
    assert only(found, "note")[0].what == "CUDA_VISIBLE_DEVICES is '1'"


def test_without_a_driver_a_gpu_recipe_fails_and_another_one_does_not(recipe, tmp_path):
    probe = RecordedGpus(trouble="no NVIDIA driver answers")
    assert [f.severity for f in check(recipe, tmp_path, probe)] == ["note"]
    [error] = check(recipe, tmp_path, probe, "target.devices=[0]", "train.device=cuda")
    assert error.severity == "error"
    assert error.mend.endswith("--set target.devices=[] --set train.device=cpu")


def test_a_torch_without_cuda_is_an_error_for_a_gpu_recipe(recipe):
    import torch

    assert not list(gpus.check_torch(world_of(recipe)))
    found = list(gpus.check_torch(world_of(recipe, *ON_GPU)))
    assert len(found) == (torch.version.cuda is None)
    assert all(f"torch {torch.__version__} was built without CUDA" in f.what for f in found)


# What the driver says.

SMI_GPUS = """\
0, GPU-aa, NVIDIA A100-SXM4-80GB, 81920, 72934, Enabled
1, GPU-bb, NVIDIA H100, PCIe, 81559, 4, Disabled
"""
SMI_HOLDERS = "GPU-aa, 4711, 72900\nGPU-aa, 4712, [N/A]\n"


def test_the_answer_of_nvidia_smi_is_understood():
    view = parse_smi(SMI_GPUS, SMI_HOLDERS)
    assert view.gpus == (
        Gpu(index=0, name="NVIDIA A100-SXM4-80GB", total=81920 << 20, used=72934 << 20,
            persistence=True),
        Gpu(index=1, name="NVIDIA H100, PCIe", total=81559 << 20, used=4 << 20, persistence=False),
    )  # fmt: skip
    assert view.holders == (
        GpuHolder(gpu=0, pid=4711, used=72900 << 20),
        GpuHolder(gpu=0, pid=4712, used=None),
    )


def test_another_answer_of_nvidia_smi_is_refused():
    with pytest.raises(ValueError, match="GPU-cc"):
        parse_smi(SMI_GPUS, "GPU-cc, 1, 2\n")
    with pytest.raises(ValueError, match="not enough values"):
        parse_smi("No devices were found\n", "")


def test_nvidia_smi_is_called(tmp_path):
    command = tmp_path / "nvidia-smi"
    command.write_text(
        "#!/bin/sh\ncase $1 in\n"
        f"--query-gpu*) printf '{SMI_GPUS}' ;;\n--query-compute*) printf '{SMI_HOLDERS}' ;;\nesac\n"
    )
    command.chmod(0o755)
    assert SmiProbe(str(command)).look() == parse_smi(SMI_GPUS, SMI_HOLDERS)
    command.write_text("#!/bin/sh\necho no driver >&2\nexit 9\n")
    assert "nvidia-smi fails" in SmiProbe(str(command)).look().trouble


def test_this_machine_is_asked_for_real():
    import torch

    view = HereProbe().look()
    if not torch.cuda.is_available():
        assert view.trouble
        assert not view.gpus
    else:
        assert len(view.gpus) >= torch.cuda.device_count()


class RecordedNvml:
    """Answers of the library, recorded by its documentation."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.is_open = 0

    def nvmlInit(self):  # noqa: N802
        self.is_open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.is_open -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return b"NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(total=10, used=7, free=3)

    def nvmlDeviceGetPersistenceMode(self, handle):  # noqa: N802
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle):  # noqa: N802
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        return [SimpleNamespace(pid=4711, usedGpuMemory=None)]


def test_the_drivers_library_is_asked_and_let_go():
    import pynvml

    nvml = RecordedNvml()
    view = NvmlProbe(nvml).look()
    assert view.gpus == (Gpu(index=0, name="NVIDIA H200", total=10, used=7, persistence=None),)
    assert view.holders == (GpuHolder(gpu=0, pid=4711, used=None),)
    assert nvml.is_open == 0
    # The recording has the names of the real one.
    assert all(hasattr(pynvml, name) for name in dir(nvml) if name.lower().startswith("nvml"))
