"""Known bugs of other trainers that do not need several processes, each with a test that would have caught it.

Elsewhere: killed and resumed runs, their order of pairs and the final checkpoint in test_resume; the step against two
oracles and accumulation in test_one_step; what concerns rows, templates and stores in tests/data; the formulas of all
losses in tests/losses; unknown transforms of logits in tests/models.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.support.compared_runs import merge
from tests.support.tiny_run import LAYOUT, PairsInMemory, TinyRun, build_run, noise_pairs
from thresher.builders.objective import build_objective
from thresher.config import parse_config
from thresher.engines.native.build import infer_engine
from thresher.errors import UserError
from thresher.losses.pairs import ExampleLogps, ObjectiveInputs, ResponseLogps
from thresher.models.loading.load import load_model
from thresher.observability.timing import ThroughputMeter

BETA = 0.1


def summed_logps(directory: Path | str, pairs: PairsInMemory, ids) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle: each pair alone, in fp64, summed by hand."""
    infer = infer_engine(load_model(str(directory), dtype=torch.float64), LAYOUT, torch.float64)
    scored = [infer.score(pairs.read([i])) for i in ids]
    return torch.stack([s.chosen.values.sum() for s in scored]), torch.stack([s.rejected.values.sum() for s in scored])


def margins(run: TinyRun, pairs: PairsInMemory, ids) -> tuple[torch.Tensor, torch.Tensor]:
    """r_w and r_l of pairs, at the start of a run."""
    policy = summed_logps(run.config.policy_path, pairs, ids)
    reference = summed_logps(run.config.reference_path, pairs, ids)
    return policy[0] - reference[0], policy[1] - reference[1]


def test_beta_ipo_and_label_smoothing_reach_the_loss(different_reference):
    """ROLL reads all three from a dict that is never filled; TRL's sigmoid ignores label smoothing."""
    pairs = noise_pairs(12)
    for values in ({"beta": 0.5}, {"label_smoothing": 0.3}, {"ipo": True, "beta": 0.2, "length_normalization": False}):
        run = build_run(merge(different_reference, values), pairs)
        chosen, rejected = margins(run, pairs, run.trainer.plan.pair_ids(0))
        z, beta, eps = chosen - rejected, values.get("beta", BETA), values.get("label_smoothing", 0.0)
        if values.get("ipo"):
            expected = (z - 1 / (2 * beta)) ** 2
        else:
            expected = -(1 - eps) * F.logsigmoid(beta * z) - eps * F.logsigmoid(-beta * z)
        loss = run.trainer.training_step()["loss"].mean
        assert loss == pytest.approx(expected.mean().item(), rel=1e-5), values


def test_the_learning_rate_decays_to_the_end_of_the_run(base):
    """ROLL's schedule ends at 1 / dp_size of the run."""
    run = build_run(base, noise_pairs(12))
    run.fit()
    rates = [metrics["lr"] for _, metrics in run.log.records]
    assert rates == pytest.approx([0.01 * left / 6 for left in (6, 5, 4, 3, 2, 1)])


def test_an_evaluation_covers_the_full_set_with_its_last_partial_batch(different_reference):
    """ROLL reports its last batch only and drops the tail; mcore_adapter drops tails."""
    validation = noise_pairs(11, seed=5)
    run = build_run(different_reference, noise_pairs(12), validation)
    metrics = run.trainer.evaluate()
    chosen, rejected = margins(run, validation, range(11))
    z = chosen - rejected
    assert metrics["eval/loss"] == pytest.approx(-F.logsigmoid(BETA * z).mean().item(), rel=1e-5)
    assert metrics["eval/rewards/margins"] == pytest.approx(BETA * z.mean().item(), rel=1e-4)
    assert metrics["eval/rewards/accuracies"] == pytest.approx((z > 0).double().mean().item())


@pytest.mark.parametrize(
    "batches",
    [*({"per_device_eval_batch_size": size} for size in (1, 3, 4, 11, 64)), {"max_tokens_per_micro_batch": 30}],
    ids=str,
)
def test_an_evaluation_does_not_depend_on_its_batches(different_reference, batches):
    changes = {"actor_train": {"training_args": batches}}
    validation = noise_pairs(11, seed=5)
    together = build_run(different_reference, noise_pairs(12), validation).trainer.evaluate()
    assert build_run(
        merge(different_reference, changes), noise_pairs(12), validation
    ).trainer.evaluate() == pytest.approx(together, rel=1e-4, abs=1e-6)


def test_a_validation_set_smaller_than_one_batch_still_gives_metrics(base):
    """ROLL: no metrics and no warning."""
    run = build_run(merge(base, {"eval_steps": 2}), noise_pairs(12), noise_pairs(1, seed=5))
    last = run.fit()
    assert len(run.log.evaluations()) == 3
    assert last["eval/loss"] != pytest.approx(math.log(2), abs=1e-4)  # after training
    assert all(math.isfinite(value) for value in last.values())


def test_evaluating_changes_nothing_about_the_training(base):
    def losses(changes: dict) -> list[float]:
        lora = {"actor_train": {"model_args": {"lora_rank": 2, "lora_dropout": 0.3}}}
        run = build_run(merge(merge(base, lora), changes), noise_pairs(12), noise_pairs(5, seed=5))
        run.fit()
        return [metrics["loss"] for _, metrics in run.log.records if "loss" in metrics]

    often = losses({"eval_steps": 1, "eval_on_start": True, "output_dir": base["output_dir"] + "-often"})
    assert often == losses({"eval_steps": 0})


def test_resuming_never_loads_policy_weights_into_the_reference(base, models):
    """ROLL's fsdp2 reference becomes the policy."""
    live = merge(base, {"reference": {"mode": "concurrent"}})
    first = build_run(live, noise_pairs(12))
    for _ in range(3):
        first.trainer.training_step()
    checkpoint = first.trainer.save()
    first.trainer.wait_for_saves()

    resumed = build_run(live, noise_pairs(12))
    resumed.trainer.resume(checkpoint)
    pairs = noise_pairs(12).read(range(4))
    fresh = infer_engine(load_model(str(models[0])), LAYOUT, torch.float32).score(pairs)
    assert torch.equal(resumed.reference.train.logps(pairs).chosen.values, fresh.chosen.values)
    trained = resumed.trainer.engine.score(pairs).chosen.values
    assert torch.equal(trained, first.trainer.engine.score(pairs).chosen.values)
    assert (trained - fresh.chosen.values).abs().max() > 1e-2


def test_auto_resume_without_a_directory_starts_from_scratch(base, tmp_path):
    """ROLL looks in a directory that does not exist yet."""
    run = build_run(base, noise_pairs(12))
    assert not (tmp_path / "out").exists()
    assert run.trainer._checkpoints.find_to_resume("auto") is None
    run.fit()
    found = run.trainer._checkpoints.find_to_resume("auto")
    assert found == tmp_path / "out" / "checkpoints" / "step-00000006"


def test_a_resumed_run_trains_on_the_rest_of_its_pairs(base):
    """ColossalChat resumes past the end of its data; ROLL continues in another order."""
    pairs = RecordedPairs(noise_pairs(12).pairs)
    uninterrupted = build_run(base, pairs)
    pairs.seen.clear()
    uninterrupted.trainer.training_step()
    checkpoint = uninterrupted.trainer.save()
    uninterrupted.trainer.wait_for_saves()
    for _ in range(5):
        uninterrupted.trainer.training_step()
    rest = pairs.seen[4:]  # the second step is read during the first

    resumed = build_run(base, pairs)
    resumed.trainer.resume(checkpoint)
    pairs.seen.clear()
    for _ in range(5):
        resumed.trainer.training_step()
    assert pairs.seen == rest
    assert len(rest) == 20


class RecordedPairs(PairsInMemory):
    """Records the ids of the pairs that are read, in order."""

    def __init__(self, pairs):
        super().__init__(pairs)
        self.seen: list[int] = []

    def read(self, ids):
        self.seen.extend(int(i) for i in ids)
        return super().read(ids)


def test_training_pairs_are_reshuffled_every_epoch(base):
    """mcore_adapter never shuffles; ColossalChat repeats one order."""
    pairs = RecordedPairs(noise_pairs(24).pairs)
    run = build_run(merge(base, {"reference": {"mode": "concurrent"}}), pairs)
    pairs.seen.clear()  # pairs that the start-up check read
    for _ in range(run.trainer.plan.num_steps):
        run.trainer.training_step()
    first, second = pairs.seen[:24], pairs.seen[24:]
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != list(range(24))
    assert first != second


def test_a_fraction_of_an_epoch_is_at_least_one_step_and_is_saved(base, tmp_path):
    """ROLL: zero steps; no final checkpoint when epochs end before max_steps."""
    run = build_run(merge(base, {"num_train_epochs": 0.01, "max_steps": 50, "save_steps": 20}), noise_pairs(12))
    run.fit()
    assert run.trainer.state.step == 1
    assert [path.name for path in (tmp_path / "out" / "checkpoints").glob("step-*")] == ["step-00000001"]


def test_a_set_smaller_than_a_batch_is_an_error(base):
    """ROLL prints `complete` without a step."""
    with pytest.raises(UserError, match="the training set has 3 pairs, fewer than one global batch of 4; lower "):
        build_run(base, noise_pairs(3))


def test_file_names_and_device_lists_are_parsed_and_unknown_keys_rejected():
    """ROLL: a string is split into characters, a YAML list fails, an unknown key is accepted."""
    config = parse_config({"actor_train": {"data_args": {"file_name": "abc.json"}, "device_mapping": [0, 1]}})
    assert config.actor_train.data_args.file_name == ["abc.json"]
    assert config.actor_train.device_mapping == [0, 1]
    with pytest.raises(UserError, match="betta: unknown key; did you mean `beta`"):
        parse_config({"betta": 0.1})


def test_a_loss_is_divided_once_for_any_accumulation(different_reference):
    """ColossalChat does not divide by its accumulation steps."""
    norms, losses = [], []
    for size, accumulation in ((8, 1), (4, 2), (2, 4), (1, 8)):
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
        run = build_run(merge(different_reference, {"actor_train": {"training_args": sizes}}), noise_pairs(12))
        losses.append(run.trainer.training_step()["loss"].mean)
        norms.append(run.trainer.state.grad_norm)
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-4)
    assert norms[0] > 0.1


@pytest.mark.parametrize("loss", ["simpo", "orpo", "cpo", "sft"])
def test_a_loss_without_a_reference_trains_and_loads_no_reference(base, loss):
    """ColossalChat's reference-free mode crashes."""
    nowhere = {"reference": {"model_args": {"model_name_or_path": "./nowhere"}}}
    run = build_run(merge(base, {"pref_loss": loss, "num_train_epochs": 8, **nowhere}), noise_pairs(12), noise_pairs(5))
    assert (run.mode, run.reference.train) == ("none", None)
    run.fit()
    losses = [metrics["loss"] for _, metrics in run.log.records if "loss" in metrics]
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.05
    assert not any("kl" in name for name in run.log.evaluations()[-1])


def test_lora_with_evaluation_runs_through_several_epochs(base):
    """ColossalChat crashes."""
    lora = {"actor_train": {"model_args": {"lora_rank": 4}, "training_args": {"learning_rate": 0.05}}}
    run = build_run(merge(base, {**lora, "num_train_epochs": 6, "eval_steps": 3}), noise_pairs(12), noise_pairs(12))
    assert run.mode == "adapter"
    run.fit()
    evaluations = run.log.evaluations()
    assert len(evaluations) == 6
    assert evaluations[-1]["eval/rewards/accuracies"] > 0.9  # it evaluates on what it trained on
    assert evaluations[-1]["eval/loss"] < evaluations[0]["eval/loss"]


def test_metrics_are_fp64_when_the_model_computes_in_bf16(different_reference):
    """ColossalChat casts its metrics to fp16."""
    run = build_run(merge(different_reference, {"actor_train": {"model_args": {"dtype": "bf16"}}}), noise_pairs(12))
    metrics = run.trainer.training_step()
    sums = torch.tensor([metric.sum for name, metric in metrics.items() if "lengths" not in name], dtype=torch.float64)
    assert (sums != sums.float().double()).any()  # a sum that was rounded on its way is an fp32 number
    loss = metrics["loss"].mean
    assert torch.tensor(loss).bfloat16().item() != pytest.approx(loss, rel=1e-5)
    assert all(weight.dtype == torch.float32 for weight in run.trainer.engine.weights().values())


def test_orpo_is_finite_where_the_policy_is_certain():
    """mcore_adapter takes log(1 - p) of p = 1."""
    objective = build_objective(parse_config({"pref_loss": "orpo"}))
    lengths = torch.tensor([2, 2, 2])
    values = torch.tensor([0.0, 0.0, -1e-12, -1e-9, -30.0, -30.0], requires_grad=True)
    rejected = torch.tensor([-2.0, -1.0, 0.0, 0.0, -1e-7, 0.0], requires_grad=True)
    sides = ExampleLogps.of(ResponseLogps(values, lengths), ResponseLogps(rejected, lengths))
    loss = objective(ObjectiveInputs(sides)).per_pair
    assert loss.isfinite().all()
    loss.sum().backward()
    assert values.grad.isfinite().all()
    assert rejected.grad.isfinite().all()


def test_a_synced_reference_resumes_from_the_checkpoint(base):
    """TRL does not save its synced reference."""
    synced = merge(base, {"reference": {"sync_steps": 2, "sync_alpha": 0.5}})
    uninterrupted = build_run(synced, noise_pairs(12))
    for _ in range(3):
        uninterrupted.trainer.training_step()
    checkpoint = uninterrupted.trainer.save()
    uninterrupted.trainer.wait_for_saves()
    saved = load_file(checkpoint / "reference.safetensors")
    start = load_model(uninterrupted.config.pretrain).state_dict()
    assert max((saved[name] - start[name]).abs().max().item() for name in saved) > 1e-3

    resumed = build_run(synced, noise_pairs(12))
    resumed.trainer.resume(checkpoint)
    for name, weight in resumed.reference.synced.reference.weights().items():
        assert torch.equal(weight, saved[name]), name
    for _ in range(3):
        assert resumed.trainer.training_step()["loss"].mean == uninterrupted.trainer.training_step()["loss"].mean


def test_throughput_counts_the_reference(base, monkeypatch):
    """NeMo-RL leaves the reference pass out: 10 pairs in 2 s, each scored before in 0.3 s, are 10 pairs in 5 s."""
    now = iter([100.0, 102.0, 102.0])
    monkeypatch.setattr("thresher.observability.timing.time.perf_counter", lambda: next(now))
    clock = ThroughputMeter()
    clock.record_step(pairs=10, useful_tokens=500)
    rates = clock.pop_rates(reference_seconds_per_pair=0.3)
    assert rates["pairs_per_second"] == pytest.approx(2.0)
    assert rates["useful_tokens_per_second"] == pytest.approx(100.0)
    monkeypatch.undo()

    run = build_run(base, noise_pairs(12))
    assert run.mode == "precompute"
    assert run.reference.train.seconds_per_pair > 0
    run.reference.train.seconds_per_pair = 50.0
    run.fit()
    assert all(metrics["pairs_per_second"] < 1 / 50 for _, metrics in run.log.records)


def test_rewards_follow_the_f_divergence(different_reference):
    """TRL reports reverse-KL rewards for every divergence. Jensen-Shannon: f'(u) = log(2u / (1 + u)), u = e^r."""
    pairs = noise_pairs(12)
    run = build_run(merge(different_reference, {"f_divergence_type": "js_divergence"}), pairs)
    chosen, rejected = margins(run, pairs, run.trainer.plan.pair_ids(0))
    expected = BETA * ((2 * chosen.sigmoid()).log() - (2 * rejected.sigmoid()).log())
    metrics = run.trainer.training_step()
    assert metrics["rewards/margins"].mean == pytest.approx(expected.mean().item(), rel=1e-4)
    assert metrics["rewards/margins"].mean != pytest.approx(BETA * (chosen - rejected).mean().item(), rel=0.02)
