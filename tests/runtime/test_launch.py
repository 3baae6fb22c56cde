"""What the environment of a process says about its launcher, and the config that follows from it."""

from __future__ import annotations

import pytest

from thresher.config import parse_config
from thresher.errors import UserError
from thresher.runtime.launch import Launch, find_launch, first_node, fit_to_launch, translate_slurm

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
}
OF_FOUR = Launch("torchrun", 0, 4, 0, ("node1", 29500))


def test_the_process_of_torchrun_is_found():
    assert find_launch(TORCHRUN) == Launch("torchrun", 3, 4, 1, ("node1", 29500))
    without_id = {key: value for key, value in TORCHRUN.items() if key != "TORCHELASTIC_RUN_ID"}
    assert find_launch(without_id) == find_launch(TORCHRUN)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "2"},
        {key: value for key, value in SRUN.items() if key != "SLURM_STEP_NODELIST"},
        SRUN | {"SLURM_NTASKS": "1"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["nothing", "one process", "no rank", "a batch script", "one task", "one task of a larger job"],
)
def test_any_other_process_is_not_launched(environ):
    assert find_launch(environ) is None


def test_torchrun_with_one_process_is_found_by_its_run_id():
    assert find_launch(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}).size == 1


def test_the_variables_of_slurm_become_those_of_torch():
    assert translate_slurm(SRUN) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "15219",
    }
    assert find_launch(SRUN) == Launch("srun", 3, 4, 1, ("gpu03", 15219))


def test_the_address_of_the_rendezvous_can_be_set_under_slurm():
    environ = SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}
    assert find_launch(environ).master == ("10.0.0.1", 29501)
    by_address = {key: value for key, value in SRUN.items() if key != "SLURM_STEP_NODELIST"}
    assert find_launch(by_address | {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.2"}).master[0] == "10.0.0.2"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[03-05,9],cpu1", "gpu03"), ("a[2,4]-b[7-8]", "a2-b7"), ("", "")],
)
def test_the_first_node_of_a_list_hosts_the_rendezvous(nodes, first):
    assert first_node(nodes) == first


def test_torchrun_inside_srun_has_precedence():
    assert find_launch(SRUN | TORCHRUN).launcher == "torchrun"


def test_a_variable_that_is_no_number_is_rejected():
    with pytest.raises(UserError, match="the environment variable RANK is 'x', not a number"):
        find_launch(TORCHRUN | {"RANK": "x"})


@pytest.mark.parametrize("runtime", ["auto", "torchrun"])
def test_the_launcher_sets_the_number_of_workers_if_the_config_does_not(runtime):
    given = parse_config({"runtime": runtime, "beta": 0.3, "actor_train": {"training_args": {"learning_rate": 0.1}}})
    config = fit_to_launch(given, OF_FOUR)
    assert (config.runtime, config.uses_ray, config.actor_train.num_workers) == ("torchrun", False, 4)
    assert config.pairs_per_step == 4 * given.pairs_per_step
    assert (config.beta, config.actor_train.training_args.learning_rate) == (0.3, 0.1)
    assert config.model_fields_set == given.model_fields_set | {"runtime", "actor_train"}
    assert fit_to_launch(config, OF_FOUR) == config


@pytest.mark.parametrize("workers", [{"num_workers": 4}, {"device_mapping": [0, 1, 2, 3]}])
def test_the_number_of_processes_must_be_that_of_the_config(workers):
    config = parse_config({"actor_train": workers})
    assert fit_to_launch(config, OF_FOUR).actor_train == config.actor_train
    key = next(iter(workers))
    with pytest.raises(UserError, match=rf"torchrun started 2 processes, but actor_train.{key} \w+ 4; start 4, or"):
        fit_to_launch(config, Launch("torchrun", 0, 2, 0, ("node1", 29500)))


@pytest.mark.parametrize("runtime", ["ray", "local"])
def test_another_runtime_is_rejected_in_a_launched_process(runtime):
    with pytest.raises(UserError, match=f"runtime is {runtime}, but torchrun started 4 processes; start thresher"):
        fit_to_launch(parse_config({"runtime": runtime}), OF_FOUR)


def test_runtime_torchrun_without_a_launcher_says_how_to_start_it():
    with pytest.raises(UserError, match="use `torchrun --nproc-per-node N -m thresher train CONFIG`, or runtime: auto"):
        fit_to_launch(parse_config({"runtime": "torchrun"}), None)


def test_without_a_launcher_a_config_is_unchanged():
    config = parse_config({"actor_train": {"num_workers": 2}})
    assert fit_to_launch(config, None) is config


@pytest.mark.parametrize(
    ("local_rank", "num_gpus", "settings", "device"),
    [
        (1, 0, {}, "cpu"),
        (1, 4, {}, "cuda:1"),
        (1, 1, {}, "cuda:0"),
        (1, 4, {"actor_train": {"device_mapping": [7, 6]}}, "cuda:2"),
        (1, 4, {"actor_train": {"device_mapping": [2, 3]}, "num_gpus_per_node": 2}, "cuda:1"),
    ],
    ids=["no GPU", "local rank", "one visible GPU per task", "mapped", "mapped, GPUs per node set"],
)
def test_a_rank_uses_the_mapped_gpu_or_that_of_its_local_rank(monkeypatch, local_rank, num_gpus, settings, device):
    import torch

    from thresher.runtime.torchrun import device_of_rank

    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    config = parse_config({"runtime": "torchrun", **settings})
    assert str(device_of_rank(Launch("torchrun", 1, 2, local_rank, ("node1", 29500)), config)) == device


def test_a_rank_without_a_gpu_is_reported(monkeypatch):
    import torch

    from thresher.runtime.torchrun import device_of_rank

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    found = r"torch finds 2 GPUs there \(CUDA_VISIBLE_DEVICES=0,1\); check nvidia-smi"
    with pytest.raises(UserError, match=rf"rank 3 of 4 on \S+ needs GPU 2, but {found}"):
        device_of_rank(Launch("torchrun", 3, 4, 2, ("node1", 29500)), parse_config({"runtime": "torchrun"}))


def test_a_setting_of_ray_is_rejected_where_torchrun_is_detected():
    with pytest.raises(UserError, match="elastic has no effect with runtime: torchrun; set runtime: ray or remove it"):
        fit_to_launch(parse_config({"elastic": True, "actor_train": {"num_workers": 4}}), OF_FOUR)
