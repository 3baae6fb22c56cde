"""Templates of model families: the text that each family's own tokenizer writes, for tokenizers without a template."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from thresher.data.rows.formats import PreferenceRow
from thresher.data.tokenization.chat_template import load_template, render, template_names
from thresher.errors import UserError
from thresher.importers.rules import TEMPLATES

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}
ANSWER, SECOND = {"role": "assistant", "content": "Because."}, {"role": "user", "content": "And?"}
GOOD, BAD = {"role": "assistant", "content": "Yes."}, {"role": "assistant", "content": "No."}
CONTROL_TOKENS = [
    *("<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"),
]
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
# text of [user, assistant, user] with the header, and what follows for the answer `Yes.`
EXPECTED = {
    "chatml": (
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nBecause.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n",
        "Yes.<|im_end|>\n",
    ),
    "qwen2_5": (
        f"<|im_start|>system\n{QWEN}<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nBecause."
        "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n",
        "Yes.<|im_end|>\n",
    ),
    "qwen3": (
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nBecause.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n",
        "<think>\n\n</think>\n\nYes.<|im_end|>\n",
    ),
    "llama3": (
        "<bos><|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        "Because.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "Yes.<|eot_id|>",
    ),
    "mistral": ("<bos>[INST] Why?[/INST] Because.<eos>[INST] And?[/INST]", " Yes.<eos>"),
    "gemma": (
        "<bos><start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\nBecause.<end_of_turn>\n"
        "<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n",
        "Yes.<end_of_turn>\n",
    ),
    "phi4": (
        "<|im_start|>user<|im_sep|>Why?<|im_end|><|im_start|>assistant<|im_sep|>Because.<|im_end|>"
        "<|im_start|>user<|im_sep|>And?<|im_end|><|im_start|>assistant<|im_sep|>",
        "Yes.<|im_end|>",
    ),
}


def tokenizer(tokens: list[str]) -> PreTrainedTokenizerFast:
    words = {token: id_ for id_, token in enumerate(["<unk>", *tokens])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        bos_token="<bos>" if "<bos>" in words else None,
        eos_token="<eos>" if "<eos>" in words else None,
    )


def text_of(name: str, prompt: list[dict], **arguments: object) -> tuple[str, str]:
    words = tokenizer(CONTROL_TOKENS)
    row = render(PreferenceRow(prompt, ([GOOD], [BAD])), load_template(words, name, arguments), words)
    return row.prompt, row.responses[0].text[len(row.prompt) :]


def test_every_template_has_an_expected_text():
    assert template_names() == sorted(EXPECTED) == sorted(set(TEMPLATES.values()))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_template_writes_the_familys_text(name):
    prompt, answer = EXPECTED[name]
    assert text_of(name, [USER, ANSWER, SECOND]) == (prompt, answer)


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("chatml", "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?"),
        ("qwen2_5", "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?"),
        ("llama3", "<bos><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"),
        ("mistral", "<bos>[INST] Be brief.\n\nWhy?[/INST]"),
        ("gemma", "<bos><start_of_turn>user\nBe brief.\n\nWhy?<end_of_turn>\n"),
    ],
)
def test_a_system_message_is_kept(name, start):
    assert text_of(name, [SYSTEM, USER])[0].startswith(start)


def test_template_arguments_reach_the_template():
    prompt, answer = text_of("qwen3", [USER], enable_thinking=False)
    assert (prompt[-len("<think>\n\n</think>\n\n") :], answer) == ("<think>\n\n</think>\n\n", "Yes.<|im_end|>\n")


@pytest.mark.parametrize("name", EXPECTED)
def test_a_tokenizer_without_the_control_tokens_is_rejected(name):
    words = tokenizer(["<bos>", "<eos>"])
    with pytest.raises(UserError, match=f"^actor_train.data_args.template={name}: the tokenizer has no token "):
        load_template(words, name, {})


def test_an_unknown_name_lists_the_templates():
    with pytest.raises(UserError, match="use auto, raw, one of chatml, gemma, llama3, mistral, phi4, qwen2_5, qwen3, "):
        load_template(tokenizer([]), "chat-ml", {})
