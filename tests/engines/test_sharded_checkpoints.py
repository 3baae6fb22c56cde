"""Checkpoints do not depend on the mesh: another mesh resumes from them, and one process reads them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.engines import parity
from tests.support.engines.saved_runs import (
    NUM_STEPS,
    SAVED_STEP,
    Result,
    Run,
    save_with_a_rank_that_cannot_write,
    train,
    train_during_a_slow_save,
)
from thresher.builders.export import export_checkpoint
from thresher.checkpoint.json_io import load_json
from thresher.checkpoint.manifest import verify
from thresher.checkpoint.tensor_files import ShardedReader, load_tensors
from thresher.distributed.mesh import ParallelDims
from thresher.errors import CheckpointError

pytestmark = pytest.mark.distributed

SPLIT = ParallelDims(dp_shard=2, tp=2)
STEP = f"step-{SAVED_STEP:08d}"
LAST = f"step-{NUM_STEPS:08d}"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return parity.save_model(tmp_path_factory.mktemp("model"), "llama", 0, num_layers=2)


def run_all(pool_of, run: Run) -> list[Result]:
    return [train(run)] if run.sizes is None else pool_of(run.sizes.num_processes).run(train, run)


@pytest.fixture(scope="module")
def saved(pool_of, model, tmp_path_factory) -> tuple[Run, list[Result]]:
    """An uninterrupted run on four ranks, FSDP2 x TP, that saves in the middle and at the end."""
    run = Run(model, tmp_path_factory.mktemp("saved"), SPLIT, saves_at=(SAVED_STEP, NUM_STEPS))
    return run, run_all(pool_of, run)


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype == torch.float32
        assert torch.equal(ours[name].view(torch.int32), tensor.view(torch.int32)), name


OTHERS = {
    "1 process": None,
    "2 ranks, dp_shard": ParallelDims(dp_shard=2),
    "2 ranks, tp": ParallelDims(tp=2),
    "2 ranks, dp_replicate": ParallelDims(dp_replicate=2),
    "4 ranks, dp_shard": ParallelDims(dp_shard=4),
    "4 ranks, dp_replicate x dp_shard": ParallelDims(dp_replicate=2, dp_shard=2),
    "4 ranks, cp x tp": ParallelDims(cp=2, tp=2),
    "2 ranks, pp": ParallelDims(pp=2),
    "4 ranks, pp x dp_shard": ParallelDims(pp=2, dp_shard=2),
}


@pytest.mark.parametrize("sizes", OTHERS.values(), ids=OTHERS)
def test_another_mesh_resumes_within_rounding(saved, pool_of, tmp_path, sizes):
    run, uninterrupted = saved
    resumed = run_all(pool_of, Run(run.model, tmp_path, sizes, start=run.root / STEP))
    for result in resumed:
        assert result.losses == pytest.approx(uninterrupted[0].losses[SAVED_STEP:], abs=TOLERANCE)
    assert len(set(uninterrupted[0].losses)) == NUM_STEPS


@pytest.mark.parametrize("sizes", OTHERS.values(), ids=OTHERS)
def test_another_mesh_loads_bitwise_the_same_state(saved, pool_of, tmp_path, sizes):
    """Resumed, not trained: the loaded state, gathered by torch, equals the saved one."""
    run, uninterrupted = saved
    results = run_all(pool_of, Run(run.model, tmp_path, sizes, start=run.root / LAST))
    for result in results:
        # a pipeline stage holds some of the parameters
        assert_same_bits(result.weights, {name: uninterrupted[0].weights[name] for name in result.weights})
        assert_same_bits(result.moments, {name: uninterrupted[0].moments[name] for name in result.moments})
    assert {name for result in results for name in result.moments} == uninterrupted[0].moments.keys()


def test_the_same_mesh_resumes_bitwise(saved, pool_of, tmp_path):
    run, uninterrupted = saved
    again = replace(run, root=tmp_path, start=run.root / STEP, saves_at=(NUM_STEPS,))
    for resumed, straight in zip(run_all(pool_of, again), uninterrupted, strict=True):
        assert resumed.losses == straight.losses[SAVED_STEP:]
        assert_same_bits(resumed.weights, straight.weights)
        assert_same_bits(resumed.moments, straight.moments)
        assert torch.equal(resumed.random_states[0], straight.random_states[1])
        assert torch.equal(resumed.random_states[-1], straight.random_states[-1])
        assert resumed.notes == []
    assert len({bytes(result.random_states[0].numpy()) for result in uninterrupted}) == 4
    # ranks also write the same files: the manifests agree on every digest
    assert verify(tmp_path / LAST).files == verify(run.root / LAST).files


def test_every_element_is_written_once(saved):
    """The files of four ranks together have the elements of one full file."""
    run, uninterrupted = saved
    for stem, expected in (("weights", uninterrupted[0].weights), ("optimizer", uninterrupted[0].moments)):
        names = sorted(path.name for path in (run.root / LAST).glob(f"{stem}-*.safetensors"))
        assert names == [f"{stem}-{rank:05d}-of-00004.safetensors" for rank in range(1, 5)]
        num_written = 0
        for name in names:
            with safe_open(run.root / LAST / name, framework="pt") as file:
                num_written += sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
        assert num_written == sum(tensor.numel() for tensor in expected.values())


def test_one_process_reads_a_sharded_checkpoint_without_a_process_group(saved):
    run, uninterrupted = saved
    assert_same_bits(load_tensors(run.root / LAST, "weights"), uninterrupted[0].weights)
    assert_same_bits(load_tensors(run.root / LAST, "optimizer"), uninterrupted[0].moments)


def test_the_export_of_four_ranks_has_their_weights(pool_of, tiny_dir, tmp_path):
    config = {"pretrain": str(tiny_dir), "actor_train": {"model_args": {"dtype": "fp32"}}}
    run = Run(tiny_dir, tmp_path / "run", SPLIT, until=1, saves_at=(1,), config=config)
    weights = run_all(pool_of, run)[0].weights
    export_checkpoint(run.root / "step-00000001", tmp_path / "model")
    assert_same_bits(load_file(tmp_path / "model" / "model.safetensors"), weights)


def test_any_slice_of_a_tensor_is_read_from_the_files_that_contain_it(saved):
    run, uninterrupted = saved
    draw = torch.Generator().manual_seed(0)
    with ShardedReader(run.root / LAST, "weights") as stored:
        for name, tensor in uninterrupted[0].weights.items():
            for _ in range(5):
                ends = [sorted(torch.randint(0, size + 1, (2,), generator=draw).tolist()) for size in tensor.shape]
                slices = tuple(slice(*end) for end in ends)
                assert torch.equal(stored.read(name, slices), tensor[slices]), (name, slices)


def test_the_index_of_all_ranks_is_verified_and_says_what_the_headers_say(saved, tmp_path):
    run, uninterrupted = saved
    assert {f"{stem}.safetensors.index" for stem in ("weights", "optimizer")} <= verify(run.root / LAST).files.keys()
    copy = shutil.copytree(run.root / LAST, tmp_path / "by an older version")
    for stem in ("weights", "optimizer"):
        indexed = load_tensors(copy, stem)
        (copy / f"{stem}.safetensors.index").unlink()
        assert_same_bits(load_tensors(copy, stem), indexed)
    assert_same_bits(indexed, uninterrupted[0].moments)


def test_hsdp_replicas_write_nothing(pool_of, model, tmp_path):
    """HSDP: one of the two replicas writes."""
    sizes = ParallelDims(dp_replicate=2, dp_shard=2)
    run = Run(model, tmp_path, sizes, until=1, saves_at=(1,))
    results = run_all(pool_of, run)
    checkpoint = tmp_path / "step-00000001"
    files = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    assert files == [
        *(f"optimizer-0000{k}-of-00002.safetensors" for k in (1, 2)),
        "rng.safetensors",
        *(f"weights-0000{k}-of-00002.safetensors" for k in (1, 2)),
    ]
    assert_same_bits(load_tensors(checkpoint, "weights"), results[0].weights)
    assert_same_bits(load_tensors(checkpoint, "optimizer"), results[0].moments)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_pipeline_stages_write_their_parameters(pool_of, tmp_path, family):
    """In qwen2 the embedding is tied: the first and the last stage both hold it."""
    model = parity.save_model(tmp_path / "model", family, 0, num_layers=2)
    run = Run(model, tmp_path / "run", ParallelDims(pp=2, tp=2), saves_at=(SAVED_STEP,))
    stages = run_all(pool_of, run)
    for sizes in (None, ParallelDims(pp=2, dp_shard=2), ParallelDims(dp_shard=2)):
        resumed = run_all(pool_of, replace(run, sizes=sizes, start=run.root / STEP, saves_at=()))
        assert resumed[0].losses == pytest.approx(stages[0].losses[SAVED_STEP:], abs=TOLERANCE)


def test_replicas_write_the_files_of_one_process(pool_of, model, tmp_path):
    copies = Run(model, tmp_path / "copies", ParallelDims(dp_replicate=2), until=1, saves_at=(1,))
    alone = replace(copies, root=tmp_path / "alone", sizes=None)
    run_all(pool_of, copies)
    run_all(pool_of, alone)
    ours, theirs = ({path.name for path in (tmp_path / who / "step-00000001").iterdir()} for who in ("copies", "alone"))
    assert ours == theirs
    assert "weights.safetensors" in ours


def test_a_checkpoint_of_partly_frozen_weights_resumes(pool_of, model, tmp_path):
    run = Run(model, tmp_path / "a", SPLIT, saves_at=(SAVED_STEP,), is_subset=True)
    uninterrupted = run_all(pool_of, run)
    assert 0 < len(uninterrupted[0].weights) < 12
    for sizes in (SPLIT, ParallelDims(dp_shard=2), None):
        resumed = run_all(pool_of, replace(run, sizes=sizes, start=run.root / STEP, root=tmp_path / "b", saves_at=()))
        assert resumed[0].losses == pytest.approx(uninterrupted[0].losses[SAVED_STEP:], abs=TOLERANCE)


def test_optimizer_groups_do_not_depend_on_sharding(saved, pool_of, model, tmp_path):
    run, _ = saved
    alone = Run(model, tmp_path, saves_at=(1,), until=1)
    train(alone)
    ours, theirs = (load_json(path / "optimizer.json") for path in (run.root / STEP, tmp_path / "step-00000001"))
    assert ours == theirs


def test_every_rank_rejects_a_checkpoint_of_other_weights(saved, pool_of, tmp_path):
    run, _ = saved
    with pytest.raises(AssertionError) as caught:
        run_all(pool_of, Run(run.model, tmp_path, SPLIT, start=run.root / STEP, is_subset=True))
    assert str(caught.value).count("was made for a different model: 17 weights differ") == 4


def test_a_corrupt_shard_is_found(saved, tmp_path):
    run, _ = saved
    copy = shutil.copytree(run.root / STEP, tmp_path / STEP)
    damaged = copy / "weights-00003-of-00004.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"weights-00003-of-00004\.safetensors does not match its digest"):
        verify(copy)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_missing_shard_is_named(saved, tmp_path, rank):
    run, _ = saved
    copy = shutil.copytree(run.root / STEP, tmp_path / STEP)
    name = f"optimizer-{rank:05d}-of-00004.safetensors"
    (copy / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        verify(copy)
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load_tensors(copy, "optimizer")


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_a_failed_save_on_one_rank_fails_on_all_and_keeps_older_checkpoints(
    saved, pool_of, model, tmp_path, async_save
):
    shutil.copytree(saved[0].root / STEP, tmp_path / STEP)
    run = Run(model, tmp_path, SPLIT, config={"async_save": async_save})
    errors = pool_of(4).run(save_with_a_rank_that_cannot_write, run)
    assert len(set(errors)) == 1
    assert errors[0].startswith("DiskError: could not save the checkpoint of step 0")
    assert "No space left on device; free some space" in errors[0]
    assert [path.name for path in tmp_path.iterdir()] == [STEP]
    verify(tmp_path / STEP)


@pytest.mark.parametrize("sizes", [SPLIT, None], ids=["4 ranks", "1 process"])
def test_an_async_save_has_the_bytes_of_its_step(pool_of, model, tmp_path, sizes):
    sync = Run(model, tmp_path / "sync", sizes, saves_at=(2, 3, NUM_STEPS))
    background = replace(sync, root=tmp_path / "async", config={"async_save": True})
    ours, theirs = run_all(pool_of, background), run_all(pool_of, sync)
    assert ours[0].losses == theirs[0].losses
    for step in sync.saves_at:
        manifests = [verify(run.root / f"step-{step:08d}") for run in (background, sync)]
        configs = {manifest.files.pop("config.json") for manifest in manifests}
        assert len(configs) == 2  # async_save itself
        assert manifests[0] == manifests[1]


@pytest.mark.parametrize("sizes", [ParallelDims(dp_shard=2), None], ids=["2 ranks", "1 process"])
def test_training_continues_during_an_async_save_that_is_published_when_all_ranks_wrote(
    pool_of, model, tmp_path, sizes
):
    slow = Run(model, tmp_path / "slow", sizes, config={"async_save": True})
    plain = Run(model, tmp_path / "plain", sizes, until=SAVED_STEP + 2, saves_at=(SAVED_STEP,))
    answers = [train_during_a_slow_save(slow)] if sizes is None else pool_of(2).run(train_during_a_slow_save, slow)
    straight = run_all(pool_of, plain)[0]
    for losses, published in answers:
        assert losses == straight.losses
        assert published == [[], [STEP]]
    for stem in ("weights", "optimizer"):
        assert_same_bits(load_tensors(slow.root / STEP, stem), load_tensors(plain.root / STEP, stem))
