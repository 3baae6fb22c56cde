"""Draw the diagrams of the docs into docs/_static/diagrams, and write the colours of all figures on the site.

python scripts/docs_diagrams.py
Each is at most 480 pixels wide, so its text is readable on a phone.
"""

from __future__ import annotations

from pathlib import Path

from figure import Figure, site_style

STATIC = Path(__file__).resolve().parents[1] / "docs" / "_static"


def step() -> Figure:
    """One optimizer step, from the plan to the log."""
    fig = Figure(
        480,
        556,
        "One training step",
        "The plan names the pairs of the step. For each micro-batch, policy and reference give log-probabilities, the "
        "objective gives a loss per pair, their sum is divided by the pairs of the whole step, and the backward runs. "
        "After the last micro-batch, gradients are summed over ranks and clipped, AdamW updates the weights, and "
        "metrics are logged.",
    )
    fig.card(10, 10, 460, 50, "box", "Plan", "the pairs of step n: a function of seed and step", anchor="middle")
    fig.arrow((240, 60), (240, 86))
    fig.box(10, 88, 460, 294, "box", radius=10)
    fig.text(24, 110, "for each micro-batch", "small muted")
    fig.card(170, 98, 286, 44, "box", "Tokens of its pairs", anchor="middle")
    fig.arrow((240, 142), (150, 166))
    fig.arrow((353, 142), (353, 166))
    fig.card(24, 168, 206, 62, "green", "Policy", "log-probabilities per", "response token", anchor="middle")
    fig.card(
        250, 168, 206, 62, "blue", "Reference", "from its cache, a live", "model or the adapter's base", anchor="middle"
    )
    fig.arrow((130, 230), (200, 254))
    fig.arrow((350, 230), (280, 254))
    fig.card(100, 256, 280, 44, "box", "Objective", "one loss per pair", anchor="middle")
    fig.arrow((240, 300), (240, 320))
    fig.card(
        24,
        322,
        432,
        48,
        "amber",
        "Sum ÷ pairs of the whole step, then backward",
        "the only division of a gradient",
        anchor="middle",
    )
    fig.text(240, 402, "after the last micro-batch", "small muted", anchor="middle")
    fig.arrow((100, 382), (100, 414))
    fig.card(10, 416, 220, 48, "box", "Sum over ranks", "gradients, never averaged", anchor="middle")
    fig.arrow((230, 440), (248, 440))
    fig.card(250, 416, 220, 48, "box", "Clip", "by the global norm", anchor="middle")
    fig.arrow((360, 464), (360, 494))
    fig.card(250, 496, 220, 48, "green", "AdamW", "updates the policy", anchor="middle")
    fig.arrow((250, 520), (232, 520))
    fig.card(10, 496, 220, 48, "box", "Log", "metrics ÷ their counts", anchor="middle")
    return fig


def shared_layout() -> Figure:
    """One pair in the padded and in the shared layout, to scale."""
    prompt, chosen, rejected = 24, 6, 12
    fig = Figure(
        480,
        300,
        "The padded and the shared layout of one pair",
        "A prompt of 24 tokens with responses of 6 and 12 tokens. Padded: two rows of 36 positions, 72 in all, with "
        "the prompt twice and 6 positions of padding. Shared: one row of 42 positions, with the prompt once.",
    )
    longest = prompt + max(chosen, rejected)

    def segment(x: float, y: float, tokens: int, classes: str, label: str) -> float:
        fig.box(x, y, tokens * 11, 30, classes, radius=4)
        if label:
            fig.text(x + tokens * 5.5, y + 20, label, "small", anchor="middle")
        return x + tokens * 11

    fig.text(10, 24, "padded", "bold")
    fig.text(470, 24, f"{2 * longest} positions", "small muted", anchor="end")
    x = segment(10, 34, prompt, "box", "prompt")
    x = segment(x, 34, chosen, "green", "chosen")
    segment(x, 34, longest - prompt - chosen, "red", "padding")
    x = segment(10, 70, prompt, "box", "the same prompt again")
    segment(x, 70, rejected, "blue", "rejected")

    fig.text(10, 138, "shared", "bold")
    fig.text(470, 138, f"{prompt + chosen + rejected} positions", "small muted", anchor="end")
    x = segment(10, 148, prompt, "box", "prompt")
    x = segment(x, 148, chosen, "green", "chosen")
    segment(x, 148, rejected, "blue", "rejected")
    middle = 10 + prompt * 11
    at_chosen, at_rejected = middle + chosen * 5.5, middle + (chosen + rejected / 2) * 11
    fig.arrow((at_chosen, 178), (at_chosen, 200), (150, 200), (150, 181), classes="green-line")
    fig.arrow((at_rejected, 178), (at_rejected, 222), (110, 222), (110, 181), classes="blue-line")
    fig.text(10, 250, "Both responses attend to the prompt and to themselves, not to", "small muted")
    fig.text(10, 267, "each other. Positions of both continue after the prompt, so the", "small muted")
    fig.text(10, 284, "numbers are the same as in two rows.", "small muted")
    return fig


def clusters() -> Figure:
    """Policy and reference workers on Ray."""
    fig = Figure(
        480,
        452,
        "Policy and reference on Ray",
        "The driver holds the config, the plan and the supervisor, and reads no weights. Policy workers train on their "
        "devices. Reference workers have their own devices, or share the policy's, and send log-probabilities directly "
        "to the policy workers. Checkpoints, prepared pairs and the reference cache are on storage that all nodes see.",
    )
    fig.card(90, 10, 300, 60, "box", "Driver", "config, plan, heartbeats, metrics", "holds no weights", anchor="middle")
    fig.arrow((170, 70), (120, 108))
    fig.arrow((310, 70), (360, 108))
    fig.box(10, 110, 220, 214, "green", radius=10)
    fig.box(250, 110, 220, 214, "blue", radius=10)
    fig.text(120, 134, "actor_train", "mono", anchor="middle")
    fig.text(120, 152, "policy, trained", "small muted", anchor="middle")
    fig.text(360, 134, "reference", "mono", anchor="middle")
    fig.text(360, 152, "frozen; here with its own workers", "small muted", anchor="middle")
    for column, tint in ((10, "policy"), (250, "reference")):
        for number in range(4):
            x, y = column + 14 + 100 * (number % 2), 166 + 74 * (number // 2)
            fig.box(x, y, 92, 64, "box")
            fig.text(x + 46, y + 28, f"worker {number}", "small bold", anchor="middle")
            device = number if tint == "policy" else number + 4
            fig.text(x + 46, y + 47, f"device {device}", "small muted", anchor="middle")
    fig.arrow((250, 232), (232, 232), classes="blue-line")
    fig.text(240, 346, "log-probabilities of the coming steps", "small", anchor="middle")
    fig.line(240, 238, 240, 332, "line")
    fig.arrow((120, 324), (120, 370))
    fig.arrow((360, 324), (360, 370))
    fig.card(
        10,
        372,
        460,
        66,
        "box",
        "Storage that every node sees",
        "prepared pairs, checkpoints, reference cache",
        "workers get file paths, not file contents",
        anchor="middle",
    )
    return fig


def mesh() -> Figure:
    """Eight workers as dp_shard 2 x cp 2 x tp 2, and what each mesh dimension splits."""
    fig = Figure(
        480,
        486,
        "Mesh dimensions",
        "Eight workers as dp_shard 2, cp 2 and tp 2. tp is innermost: neighbours 0 and 1 split every matrix. cp splits "
        "each packed row between ranks 0, 1 and 2, 3. dp_shard splits the pairs of a step and shards weights between "
        "ranks 0 to 3 and 4 to 7. dp_replicate and pp, outside of them, are 1 here.",
    )
    fig.text(10, 22, "8 workers = dp_shard 2 x cp 2 x tp 2", "bold")
    for shard in range(2):
        x = 10 + 235 * shard
        fig.box(x, 36, 225, 182, "green", radius=10)
        fig.text(x + 12, 57, f"dp_shard {shard}", "small bold")
        for context in range(2):
            y = 66 + 74 * context
            fig.box(x + 10, y, 205, 66, "blue", radius=8)
            fig.text(x + 20, y + 18, f"cp {context}", "small bold")
            for tensor in range(2):
                fig.box(x + 60 + 76 * tensor, y + 8, 70, 50, "amber")
                rank = 4 * shard + 2 * context + tensor
                fig.text(x + 95 + 76 * tensor, y + 29, f"rank {rank}", "small bold", anchor="middle")
                fig.text(x + 95 + 76 * tensor, y + 46, f"tp {tensor}", "small muted", anchor="middle")
    rows = (
        ("amber", "tp", "tp_size", "splits every matrix and the attention heads"),
        ("blue", "cp", "cp_size", "splits each packed row, for long sequences"),
        ("green", "dp_shard", "what the others leave", "splits the pairs, shards weights and optimizer"),
        ("box", "dp_replicate", "dp_replicate", "splits the pairs, repeats the shards (HSDP)"),
        ("box", "pp", "pp_size", "splits the layers into stages"),
    )
    for number, (classes, name, key, text) in enumerate(rows):
        y = 236 + 46 * number
        fig.box(10, y, 18, 36, classes, radius=4)
        fig.text(40, y + 15, name, "bold")
        fig.text(40, y + 32, text, "small muted")
        fig.text(470, y + 15, key, "mono", anchor="end")
    fig.text(10, 480, "From top to bottom: from the innermost dimension to the outermost.", "small muted")
    return fig


def recovery() -> Figure:
    """A worker dies at step 14; the run continues from the checkpoint of step 10."""
    fig = Figure(
        480,
        430,
        "What happens when a worker dies",
        "A checkpoint is written at step 10 and a worker dies at step 14. The driver stops all workers, picks the "
        "newest checkpoint that verifies, starts new workers, removes the log records after step 10 and repeats steps "
        "11 to 14. The run ends bitwise as without the failure.",
    )
    left, right, top = 28, 452, 58

    def at(number: float) -> float:
        return left + (right - left) * (number - 8) / 10

    fig.text(10, 22, "A worker dies at step 14", "bold")
    fig.line(left, top, at(14), top, "green-line")
    for number in range(8, 15):
        fig.box(at(number) - 4, top - 4, 8, 8, "green" if number < 14 else "red", radius=4)
        if number % 2 == 0:
            fig.text(at(number), top + 24, f"{number}", "small muted", anchor="middle")
    fig.text(at(10), top - 14, "checkpoint", "small", anchor="middle")
    fig.text(at(14) + 12, top + 5, "worker killed", "small red-text")
    steps = (
        ("red", "Stop", "the driver ends all workers; they would wait for it"),
        ("box", "Verify", "the newest checkpoint whose files match their digests"),
        ("box", "Wait", "1, 2, 4, … seconds, at most a minute"),
        ("box", "Restart", "new workers, models and optimizer from step 10"),
        ("green", "Repeat", "log records after step 10 are removed; 11 to 14 run again"),
    )
    for number, (classes, name, text) in enumerate(steps):
        y = 104 + 46 * number
        fig.box(10, y, 460, 36, classes)
        fig.text(24, y + 23, name, "bold")
        fig.text(92, y + 23, text, "small")
        if number:
            fig.arrow((40, y - 10), (40, y))
    top = 372
    fig.line(left, top, at(18), top, "green-line")
    for number in range(8, 19):
        fig.box(at(number) - 4, top - 4, 8, 8, "amber" if 10 < number <= 14 else "green", radius=4)
        if number % 2 == 0:
            fig.text(at(number), top + 24, f"{number}", "small muted", anchor="middle")
    fig.text(at(12.5), top - 14, "repeated", "small amber-text", anchor="middle")
    fig.text(10, 422, "On the same number of workers, the weights end bitwise the same.", "small muted")
    return fig


FIGURES = {
    "step": step,
    "shared-layout": shared_layout,
    "clusters": clusters,
    "mesh": mesh,
    "recovery": recovery,
}


def files() -> dict[Path, str]:
    """Return the text of every file that this program writes."""
    drawn = {STATIC / "diagrams" / f"{name}.svg": draw().svg() for name, draw in FIGURES.items()}
    return {**drawn, STATIC / "figures.css": site_style()}


def main() -> None:
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
