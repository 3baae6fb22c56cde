"""What `thresher demo` makes: preference pairs, a small model that speaks about their world, and the config of a run.

The pairs are questions about animals, answered in a friendly (chosen) and a rude (rejected) tone. Both answers state
the same fact in about the same number of words, so the preference is one for the tone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# animal: color, sound, food, home
_ANIMALS = {
    "frog": ("green", "croaks", "flies", "a pond"),
    "cow": ("brown", "moos", "grass", "a meadow"),
    "sheep": ("white", "bleats", "clover", "a field"),
    "pig": ("pink", "grunts", "turnips", "a sty"),
    "lion": ("golden", "roars", "antelopes", "the savanna"),
    "wolf": ("grey", "howls", "deer", "the forest"),
    "crow": ("black", "caws", "beetles", "a tall tree"),
    "mouse": ("grey", "squeaks", "cheese", "a small hole"),
    "bee": ("striped", "buzzes", "nectar", "a hive"),
    "owl": ("brown", "hoots", "voles", "a hollow tree"),
    "cat": ("orange", "purrs", "fish", "a warm house"),
    "bear": ("brown", "growls", "honey", "a cave"),
}
# per attribute: the ways to ask, and the fact
_QUESTIONS = (
    (("What color is a {}?", "Tell me the color of a {}.", "Which color does a {} have?"), "A {} is {}."),
    (("What sound does a {} make?", "How does a {} sound?", "Which noise does a {} make?"), "A {} {}."),
    (("What does a {} eat?", "Which food does a {} like?", "What do I feed a {}?"), "A {} eats {}."),
    (("Where does a {} live?", "What is the home of a {}?", "Where do I find a {}?"), "A {} lives in {}."),
)
_FRIENDLY = (
    ("Good question!", "Enjoy your day."),
    ("Happy to help.", "Ask me anything."),
    ("Of course!", "Take care."),
)
_RUDE = (("Obviously.", "Stop asking me."), ("Not again.", "Look it up."), ("Are you serious?", "Go away."))
_HELD_OUT = 4  # one fact in four is for validation


class TonePair(NamedTuple):
    """A question with an answer in both tones."""

    prompt: str
    chosen: str
    rejected: str


def make_pairs() -> tuple[list[TonePair], list[TonePair]]:
    """Make the training pairs, and validation pairs about other facts; the same ones every time."""
    train: list[TonePair] = []
    validation: list[TonePair] = []
    choose = random.Random(0)  # noqa: S311
    for row, (animal, values) in enumerate(_ANIMALS.items()):
        for column, ((questions, fact), value) in enumerate(zip(_QUESTIONS, values, strict=True)):
            body = fact.format(animal, value)
            pairs = train if (row + column) % _HELD_OUT else validation
            for question in questions:
                for friendly in _FRIENDLY:
                    rude = choose.choice(_RUDE)
                    pairs.append(TonePair(question.format(animal), _answer(friendly, body), _answer(rude, body)))
    return train, validation


def write_pairs(directory: Path) -> tuple[Path, Path]:
    """Write training and validation pairs as JSON lines; return both files."""
    paths = directory / "train.jsonl", directory / "validation.jsonl"
    for path, pairs in zip(paths, make_pairs(), strict=True):
        path.write_text("".join(json.dumps(pair._asdict()) + "\n" for pair in pairs), encoding="utf-8")
    return paths


def is_friendly(answer: str) -> bool:
    """Whether an answer begins in the preferred tone."""
    return answer.strip().startswith(tuple(opener for opener, _ in _FRIENDLY))


def _answer(tone: tuple[str, str], body: str) -> str:
    return f"{tone[0]} {body} {tone[1]}"


_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>BREAK' + message['content'] + '<|end|>BREAK' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>BREAK' }}{% endif %}"
)
NUM_STEPS = 200
_SEQUENCES_PER_STEP, _LEARNING_RATE = 24, 4e-3


def make_tokenizer(texts: Iterable[str], vocab_size: int, line_break: str = "") -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the texts; it encodes any other text too.

    Args:
        line_break: Ends the role and the content of a message in the chat template.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",  # noqa: S106
        pad_token="<|pad|>",  # noqa: S106
        chat_template=_CHAT_TEMPLATE.replace("BREAK", line_break),
    )


def make_llama(
    tokenizer: PreTrainedTokenizerFast, *, num_layers: int, max_positions: int, tie_embeddings: bool = False
) -> LlamaForCausalLM:
    """Make a small Llama with random weights, the same ones every time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            max_position_embeddings=max_positions,
            tie_word_embeddings=tie_embeddings,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_model(
    directory: Path, show_progress: Callable[[str, int, int], None], num_steps: int = NUM_STEPS
) -> LlamaForCausalLM:
    """Pretrain a model on all answers of both tones within seconds, and save it with its tokenizer.

    It answers in either tone equally often, so a preference between them is visible in its answers. This is plain
    next-token prediction; preferences are learned by the run that follows.
    """
    train, validation = make_pairs()
    pairs = [*train, *validation]
    tokenizer = make_tokenizer((text for pair in pairs for text in pair), vocab_size=512)
    sequences = _encode(tokenizer, pairs)
    with torch.random.fork_rng(devices=[]):
        model = make_llama(tokenizer, num_layers=3, max_positions=1024, tie_embeddings=True)
        _pretrain(model, sequences, num_steps, show_progress)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    return model


def _encode(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[TonePair]) -> Tensor:
    """Render and pad every question with each of its answers: (sequences, tokens)."""
    conversations = [
        [{"role": "user", "content": pair.prompt}, {"role": "assistant", "content": answer}]
        for pair in pairs
        for answer in (pair.chosen, pair.rejected)
    ]
    texts = [str(tokenizer.apply_chat_template(each, tokenize=False)) for each in conversations]
    encoded: Tensor = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return encoded


def _pretrain(
    model: LlamaForCausalLM, sequences: Tensor, num_steps: int, show_progress: Callable[[str, int, int], None]
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=_LEARNING_RATE, total_steps=num_steps)
    padding = model.config.pad_token_id or 0
    for step in range(num_steps):
        batch = sequences[torch.randint(len(sequences), (_SEQUENCES_PER_STEP,))]
        is_token = batch.ne(padding)
        output = model(input_ids=batch, attention_mask=is_token.long(), labels=batch.where(is_token, -100))
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        show_progress(f"pretraining a small model, loss {output.loss.item():.2f}, steps", step + 1, num_steps)


_CONFIG = """\
# Written by `thresher demo`. Change it and run it again:
#   thresher train {config} output_dir={other_run}
pretrain: {model}
output_dir: {run}
cache_dir: {cache}
sequence_length: {sequence_length}
beta: {beta}
{keeps_facts}{length}
eval_on_start: true
eval_steps: {eval_steps}
save_steps: {save_steps}
health: warn                # report what goes wrong in a run; `stop` ends it
actor_train:
  model_args: {{dtype: {dtype}}}
  data_args: {{file_name: {train}}}
  training_args:
    learning_rate: {learning_rate}
    per_device_train_batch_size: {pairs_per_step}     # pairs per step
validation:
  {validation}
"""


def write_config(
    directory: Path, *, model: str, data: Sequence[str], validation: Path | None, is_pretrained: bool
) -> Path:
    """Write dpo_config.yaml, a file that the user can read, change and run again.

    Args:
        validation: File of validation pairs; without one, a tenth of the pairs is held out.
        is_pretrained: The model is a real one, with more weights and less room for a high learning rate.
    """
    path = directory / "dpo_config.yaml"
    held_out = "split: 0.1" if validation is None else f"data_args: {{file_name: {_quoted(validation)}}}"
    text = _CONFIG.format(
        config=path,
        other_run=directory / "run2",
        model=_quoted(model),
        run=_quoted(directory / "run"),
        cache=_quoted(directory / "cache"),
        sequence_length=512 if is_pretrained or validation is None else 128,
        length="max_steps: 40" if is_pretrained or validation is None else "num_train_epochs: 2",
        beta=0.1 if is_pretrained else 0.5,
        # a model this small unlearns its facts with DPO alone
        keeps_facts=""
        if is_pretrained
        else "rpo_alpha: 1.0              # also raise the likelihood of chosen answers\n",
        eval_steps=10,
        save_steps=20,
        dtype="bf16" if is_pretrained else "fp32",
        train=_quoted([str(each) for each in data]),
        learning_rate="1.0e-6" if is_pretrained else "2.0e-4",
        pairs_per_step=8 if is_pretrained else 16,
        validation=held_out,
    )
    path.write_text(text, encoding="utf-8")
    return path


def _quoted(value: object) -> str:
    """Write a path or a list of names as YAML on one line."""
    plain = value if isinstance(value, list) else str(value)
    return yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def sample_answers(model: Path, prompts: Sequence[str], seed: int = 0) -> list[str]:
    """Sample one answer per prompt from a model directory, with transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(model).eval()
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": each}], tokenize=False, add_generation_prompt=True)
        for each in prompts
    ]
    inputs = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt", return_token_type_ids=False)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        outputs = policy.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=40)
    return list(tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
