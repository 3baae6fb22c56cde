"""Where the prompt ends, which tokens are scored, how many BOS and EOS a pair has, and overlong pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.support.small_tokenizer import make_tokenizer
from thresher.data.example import Example
from thresher.data.rows.formats import PreferenceRow, detect_format, to_preference_row
from thresher.data.rows.parsing import BadRowError
from thresher.data.tokenization.chat_template import find_template_file, load_template, render
from thresher.data.tokenization.control_tokens import ControlTokens, PlaceholderTokenizer
from thresher.data.tokenization.tokenizer import RowTokenizer, TokenizedRow, example_length, needed_length, truncate
from thresher.errors import UserError


def row_of(columns: dict[str, Any]) -> PreferenceRow:
    return to_preference_row(columns, detect_format(columns, {}, "here"), {})


def tokenize(columns: dict[str, Any], tokenizer: Any, template: str = "auto", **arguments: Any) -> TokenizedRow:
    loaded = load_template(tokenizer, template, arguments)
    control = ControlTokens(tokenizer, loaded)
    row = row_of(columns)
    rendered = render(row, loaded, tokenizer) if control.find(row) is None else control.render_as_text(row)
    (result,) = RowTokenizer(tokenizer, loaded, control.placeholders)([rendered])
    return result


def texts(prompt: str, chosen: str = "yes", rejected: str = "no") -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_the_assistant_header_is_not_scored(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    pair = tokenize(texts("Why?"), chat_tokenizer).example
    assert chat_tokenizer.decode(pair.prompt_ids) == "<s><|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert chat_tokenizer.decode(pair.chosen.ids) == "yes<|im_end|>"
    assert chat_tokenizer.decode(pair.rejected.ids) == "no<|im_end|>"
    assert pair.chosen.mask is None


def test_bos_is_not_repeated_when_template_and_tokenizer_both_write_it(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    bos = chat_tokenizer.bos_token_id
    assert chat_tokenizer("a").input_ids[0] == bos
    for template in ("auto", "raw"):
        ids = tokenize(texts("Why?"), chat_tokenizer, template).example.prompt_ids.tolist()
        assert ids[0] == bos
        assert ids.count(bos) == 1
    repeated = tokenize(texts("<s>Why?"), chat_tokenizer, "raw").example.prompt_ids.tolist()
    assert repeated.count(bos) == 1


@pytest.mark.parametrize("times", [2, 3])
def test_a_template_that_repeats_bos_gives_one(
    chat_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, times: int
) -> None:
    file = tmp_path / "repeated.jinja"
    file.write_text("{{ bos_token }}" * times + "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    ids = tokenize(texts("Why?"), chat_tokenizer, str(file)).example.prompt_ids.tolist()
    assert ids.count(chat_tokenizer.bos_token_id) == 1
    assert ids[0] == chat_tokenizer.bos_token_id


def test_the_prompt_equals_the_generation_prompt_of_the_chat_template(
    chat_tokenizer: PreTrainedTokenizerFast,
) -> None:
    pair = tokenize(texts("Why?"), chat_tokenizer).example
    expected = chat_tokenizer.apply_chat_template([{"role": "user", "content": "Why?"}], add_generation_prompt=True)
    assert pair.prompt_ids.tolist() == expected["input_ids"]


@pytest.mark.parametrize("template", ["auto", "raw"])
@pytest.mark.parametrize("ending", ["", "<|im_end|>", "<|im_end|>\n", "<|im_end|><|im_end|> "])
def test_a_response_ends_with_one_eos(chat_tokenizer: PreTrainedTokenizerFast, template: str, ending: str) -> None:
    pair = tokenize(texts("Why?", f"yes{ending}"), chat_tokenizer, template).example
    eos = chat_tokenizer.eos_token_id
    assert pair.rejected.ids.tolist().count(eos) == 1
    assert pair.chosen.ids[-1] == eos
    if template == "raw":
        assert pair.chosen.ids.tolist().count(eos) == 1


def test_eos_is_added_where_the_template_ends_turns_with_another_token() -> None:
    tokenizer = make_tokenizer(eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    assert tokenizer.decode(tokenize(texts("Why?"), tokenizer).example.chosen.ids) == "yes<|im_end|></s>"


def test_bos_that_is_also_eos_is_kept_at_both_ends() -> None:
    tokenizer = make_tokenizer(eos_token="<s>")
    pair = tokenize(texts("Why?", " yes", " no"), tokenizer, "raw").example
    assert tokenizer.decode(pair.prompt_ids) == "<s>Why?"
    assert tokenizer.decode(pair.chosen.ids) == " yes<s>"


def test_raw_texts_are_joined_without_a_separator(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    pair = tokenize(texts("Once upon", " a time", " a mat"), chat_tokenizer, "raw").example
    assert chat_tokenizer.decode([*pair.prompt_ids, *pair.chosen.ids]) == "<s>Once upon a time<|im_end|>"


def test_raw_messages_are_joined_by_blank_lines(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    columns = {"instruction": "Correct it.", "input": "freind", "system": "Be kind.", "chosen": "a", "rejected": "b"}
    pair = tokenize(columns, chat_tokenizer, "raw").example
    assert chat_tokenizer.decode(pair.prompt_ids) == "<s>Be kind.\n\nCorrect it.\n\nfreind\n\n"


def test_a_raw_transcript_keeps_its_text(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    start = "\n\nHuman: hi\n\nAssistant:"
    pair = tokenize({"chosen": f"{start} yes", "rejected": f"{start} no"}, chat_tokenizer, "raw").example
    assert chat_tokenizer.decode(pair.prompt_ids) == f"<s>{start}"
    assert chat_tokenizer.decode(pair.chosen.ids) == " yes<|im_end|>"


def test_a_split_inside_a_merged_token_moves_back_and_is_reported() -> None:
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2, "bc": 3, "</s>": 4}, [("b", "c")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    moved = tokenize(texts("ab", "ca", "aa"), tokenizer, "raw")
    assert moved.split_moved
    assert moved.example.prompt_ids.tolist() == [0]
    assert moved.example.chosen.ids.tolist() == [3, 0, 4]
    assert moved.example.rejected.ids.tolist() == [1, 0, 0, 4]
    assert not tokenize(texts("ab", "aa", "a"), tokenizer, "raw").split_moved


def test_only_assistant_turns_of_a_long_response_are_scored(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    turns = [("assistant", "yes"), ("user", "oh"), ("assistant", "good")]
    chosen = [{"role": role, "content": content} for role, content in turns]
    for template, scored in (("auto", "yes<|im_end|>good<|im_end|>"), ("raw", "yesgood<|im_end|>")):
        pair = tokenize(
            {"prompt": [{"role": "user", "content": "Why?"}], "chosen": chosen, "rejected": "no"},
            chat_tokenizer,
            template,
        ).example
        assert pair.chosen.mask is not None
        assert len(pair.chosen.mask) == len(pair.chosen.ids)
        assert chat_tokenizer.decode(pair.chosen.ids[pair.chosen.mask]) == scored
        assert pair.rejected.mask is None


def test_a_token_that_merges_the_end_of_a_header_with_a_turn_is_scored() -> None:
    vocabulary = {text: number for number, text in enumerate(("q", ":", " ", "a", "b", "\n", " a", "</s>"))}
    backend = Tokenizer(models.BPE(vocabulary, [(" ", "a")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ ': ' if m['role'] == 'assistant' else 'q' }}"
        "{{ m['content'] }}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ ': ' }}{% endif %}"
    )
    turns = [("assistant", "b"), ("user", "b"), ("assistant", "ab")]
    chosen = [{"role": role, "content": content} for role, content in turns]
    row = {"prompt": [{"role": "user", "content": "q"}], "chosen": chosen, "rejected": "b"}
    pair = tokenize(row, tokenizer).example
    scored = tokenizer.convert_ids_to_tokens(pair.chosen.ids[pair.chosen.mask])
    assert scored == ["b", "\n", " a", "b", "\n", "</s>"]


def test_only_assistant_turns_of_a_raw_transcript_are_scored(
    chat_tokenizer: PreTrainedTokenizerFast,
) -> None:
    start = "\n\nHuman: hi\n\nAssistant:"
    columns = {"chosen": f"{start} yes\n\nHuman: oh\n\nAssistant: good", "rejected": f"{start} no"}
    pair = tokenize(columns, chat_tokenizer, "raw").example
    assert chat_tokenizer.decode(pair.chosen.ids[pair.chosen.mask]) == " yes good<|im_end|>"
    assert chat_tokenizer.decode(pair.chosen.ids) == " yes\n\nHuman: oh\n\nAssistant: good<|im_end|>"


def test_tools_and_thinking_reach_the_template(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    columns = texts("Why?", [{"role": "assistant", "content": "yes", "thinking": "hm"}])
    pair = tokenize({**columns, "tools": [{"name": "now"}]}, chat_tokenizer).example
    assert '[{"name": "now"}]' in chat_tokenizer.decode(pair.prompt_ids)
    assert chat_tokenizer.decode(pair.chosen.ids) == "<think>hm</think>yes<|im_end|>"


def test_template_arguments_reach_the_template(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    file = tmp_path / "t.jinja"
    file.write_text("{{ mood }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    pair = tokenize(texts("Why?"), tokenizer, str(file), mood="good").example
    assert tokenizer.decode(pair.prompt_ids) == "goodWhy?"


def test_a_think_block_only_in_the_generation_prompt_is_not_part_of_the_prompt(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    file = tmp_path / "t.jinja"
    file.write_text(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: <think>{% endif %}"
    )
    template = load_template(tokenizer, str(file), {})
    rendered = render(row_of(texts("Why?")), template, tokenizer)
    assert rendered.header_shortened
    assert rendered.prompt == "<|im_start|>user: Why?<|im_end|><|im_start|>assistant: "


def test_an_answer_that_begins_like_the_think_block_keeps_its_characters(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    file = tmp_path / "t.jinja"
    file.write_text(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: <think>{% endif %}"
    )
    template = load_template(tokenizer, str(file), {})
    rendered = render(row_of(texts("Why?", "<table>", "<tr>")), template, tokenizer)
    assert rendered.prompt == "<|im_start|>user: Why?<|im_end|><|im_start|>assistant: "
    turns = [("assistant", "<td>"), ("user", "oh"), ("assistant", "<table>")]
    chosen = [{"role": role, "content": content} for role, content in turns]
    prompt = [{"role": "user", "content": "Why?"}]
    side = render(row_of({"prompt": prompt, "chosen": chosen, "rejected": "<tr>"}), template, tokenizer).responses[0]
    assert [side.text[begin:end] for begin, end in side.scored_spans or ()] == ["<td><|im_end|>", "<table><|im_end|>"]


def test_a_template_that_rewrites_the_prompt_gives_a_bad_row(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages | length }} {% for m in messages %}{{ m['content'] }}{% endfor %}")
    template = load_template(tokenizer, str(file), {})
    with pytest.raises(BadRowError, match="renders the prompt differently when an answer follows"):
        render(row_of(texts("Why?")), template, tokenizer)


def test_a_template_that_drops_the_answers_gives_empty_responses(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages[0]['content'] }}{% if add_generation_prompt %}: {% endif %}")
    rendered = render(row_of(texts("Why?")), load_template(tokenizer, str(file), {}), tokenizer)
    assert (rendered.prompt, *(each.text for each in rendered.responses)) == ("Why?",) * 3


def test_a_template_that_rejects_a_row_gives_a_bad_row(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    file = tmp_path / "t.jinja"
    file.write_text("{% if messages | length > 1 %}{{ raise_exception('one turn only') }}{% endif %}x")
    with pytest.raises(BadRowError, match="the chat template rejects the row: one turn only"):
        render(row_of(texts("Why?")), load_template(tokenizer, str(file), {}), tokenizer)


def test_raw_text_rejects_tools(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(BadRowError, match=r"`tools`, which template raw cannot render"):
        tokenize({**texts("Why?"), "tools": [{"name": "now"}]}, chat_tokenizer, "raw")


def test_a_response_without_tokens_is_empty() -> None:
    backend = Tokenizer(models.BPE({"a": 0, "</s>": 1}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert tokenize(texts("a", "?", "a"), tokenizer, "raw").has_empty_response


def test_a_missing_chat_template_suggests_the_alternatives_with_their_full_key() -> None:
    key = "validation.data_args.template"
    with pytest.raises(UserError) as caught:
        load_template(make_tokenizer(), "auto", {}, key)
    assert str(caught.value) == (
        f"the tokenizer has no chat template; use {key}=raw for plain text, {key}=FAMILY for a model of the family "
        f"chatml, gemma, llama3, mistral, phi4, qwen2_5, qwen3, or {key}=FILE.jinja for a custom template"
    )


def test_a_missing_template_file_is_an_error() -> None:
    with pytest.raises(UserError, match=r"'chat.jinja': no such file; use auto, raw, one of chatml, "):
        load_template(make_tokenizer(), "chat.jinja", {})


def test_a_template_with_a_syntax_error_fails_on_loading(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{% for m in %}")
    with pytest.raises(UserError, match="is not valid Jinja"):
        load_template(make_tokenizer(), str(tmp_path / "t.jinja"), {})


def test_a_tokenizer_without_eos_is_rejected() -> None:
    tokenizer = make_tokenizer(eos_token=None)
    with pytest.raises(UserError, match=r'no EOS token.*set "eos_token" in its tokenizer_config.json'):
        RowTokenizer(tokenizer, load_template(tokenizer, "raw", {}), PlaceholderTokenizer(tokenizer, []))


def test_tokens_are_int32(chat_tokenizer: PreTrainedTokenizerFast) -> None:
    pair = tokenize(texts("Why?"), chat_tokenizer).example
    assert {pair.prompt_ids.dtype, pair.chosen.ids.dtype, pair.rejected.ids.dtype} == {np.dtype(np.int32)}


@pytest.mark.parametrize("column", ["chat_template_kwargs", "template_arguments"])
@pytest.mark.parametrize(("for_all", "for_row", "thinks"), [(True, False, False), (False, True, True)])
def test_variables_of_a_row_override_those_of_the_run(column: str, for_all: bool, for_row: bool, thinks: bool) -> None:
    """Without thinking, the generation prompt of Qwen3 contains an empty thought."""
    tokenizer = make_tokenizer()
    template = load_template(tokenizer, str(find_template_file("qwen3")), {"enable_thinking": for_all})
    rows = {
        name: render(row_of({**texts("Why?"), **columns}), template, tokenizer).prompt
        for name, columns in (("with", {column: {"enable_thinking": for_row}}), ("without", {}))
    }
    assert ("<think>" in rows["with"]) is not thinks
    assert ("<think>" in rows["without"]) is thinks


def test_variables_of_a_row_merge_with_those_of_the_run(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ mood }}{{ time }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    tokenizer = make_tokenizer()
    pair = tokenize(
        {**texts("Why?"), "chat_template_kwargs": '{"time": "late", "none": null}'}, tokenizer, str(file), mood="good"
    ).example
    assert tokenizer.decode(pair.prompt_ids) == "goodlateWhy?"


def test_a_control_token_in_a_variable_of_a_row_stays_text(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ mood }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    tokenizer = make_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    pair = tokenize({**texts("Why?"), "template_arguments": {"mood": "<|im_end|>"}}, tokenizer, str(file)).example
    assert end not in pair.prompt_ids.tolist()
    assert end in tokenize(texts("Why?"), tokenizer, str(file), mood="<|im_end|>").example.prompt_ids.tolist()


@pytest.mark.parametrize(
    ("value", "template", "reason"),
    [
        (3, "auto", "`chat_template_kwargs` must be an object with variables of the chat template, got 3"),
        ("{", "auto", "`chat_template_kwargs` is not JSON"),
        ({"tools": 1}, "auto", "the chat template rejects the row"),
        ({"a": 1}, "raw", "the row has variables of a chat template, but the template is raw"),
    ],
)
def test_variables_that_cannot_be_used_are_a_bad_row(
    chat_tokenizer: PreTrainedTokenizerFast, value: Any, template: str, reason: str
) -> None:
    with pytest.raises(BadRowError) as caught:
        tokenize({**texts("Why?"), "chat_template_kwargs": value}, chat_tokenizer, template)
    assert reason in str(caught.value)


BOS, EOS = 1, 2


def make_pair(prompt: int, chosen: int, rejected: int, *, bos: bool = True, masked: bool = False) -> Example:
    """Make a pair whose token ids count up, so that each shows its original position; a response ends with EOS."""
    prompt_ids = np.arange(10, 10 + prompt, dtype=np.int32)
    if bos:
        prompt_ids[0] = BOS
    sides = [np.append(np.arange(100, 100 + length - 1), EOS).astype(np.int32) for length in (chosen, rejected)]
    masks = [np.arange(length) % 3 == 0 if masked else None for length in (chosen, rejected)]
    return Example.pair(prompt_ids, *sides, *masks)


def test_a_pair_that_fits_is_unchanged() -> None:
    pair = make_pair(4, 3, 6)
    assert example_length(pair) == 10
    for how in ("drop", "prompt_start", "response_end"):
        assert truncate(pair, 10, how, BOS) is pair  # type: ignore[arg-type]
    assert truncate(make_pair(4, 3, 600), None, "drop", BOS) is not None


def test_drop_drops_an_overlong_pair() -> None:
    assert truncate(make_pair(4, 3, 6), 9, "drop", BOS) is None


def test_prompt_start_removes_the_oldest_tokens_and_keeps_bos() -> None:
    cut = truncate(make_pair(5, 3, 6), 9, "prompt_start", BOS)
    assert cut is not None
    assert cut.prompt_ids.tolist() == [BOS, 13, 14]
    assert (len(cut.chosen.ids), len(cut.rejected.ids)) == (3, 6)


def test_prompt_start_without_bos_keeps_the_newest_tokens() -> None:
    cut = truncate(make_pair(5, 3, 6, bos=False), 9, "prompt_start", BOS)
    assert cut is not None
    assert cut.prompt_ids.tolist() == [12, 13, 14]


def test_prompt_start_drops_a_pair_whose_prompt_would_be_empty() -> None:
    assert truncate(make_pair(5, 3, 6), 8, "prompt_start", BOS) is not None
    assert truncate(make_pair(5, 3, 6), 7, "prompt_start", BOS) is None


def test_a_truncated_response_has_no_eos() -> None:
    cut = truncate(make_pair(4, 3, 6, masked=True), 8, "response_end", BOS)
    assert cut is not None
    assert cut.rejected.ids.tolist() == [100, 101, 102, 103]
    assert cut.chosen.ids.tolist() == [100, 101, EOS]  # it fits, so it keeps its EOS


def test_masks_are_truncated_with_their_responses() -> None:
    cut = truncate(make_pair(4, 5, 6, masked=True), 8, "response_end", BOS)
    assert cut is not None
    assert cut.chosen.mask is not None
    assert cut.rejected.mask is not None
    assert cut.chosen.ids.tolist() == cut.rejected.ids.tolist() == [100, 101, 102, 103]
    assert cut.chosen.mask.tolist() == cut.rejected.mask.tolist() == [True, False, False, True]


def test_response_end_drops_a_pair_without_room_for_a_response() -> None:
    assert truncate(make_pair(6, 3, 6), 6, "response_end", BOS) is None
    cut = truncate(make_pair(6, 3, 6), 7, "response_end", BOS)
    assert cut is not None
    assert (cut.chosen.ids.tolist(), cut.rejected.ids.tolist()) == ([100], [100])


lengths = st.integers(1, 20)
KINDS = ["drop", "prompt_start", "response_end"]


@given(lengths, lengths, lengths, st.sampled_from(KINDS), st.booleans())
def test_the_needed_length_keeps_a_pair_and_one_token_less_does_not(
    prompt: int, chosen: int, rejected: int, how: str, bos: bool
) -> None:
    pair = make_pair(prompt, chosen, rejected, bos=bos)
    needed = needed_length(pair, how, BOS)  # type: ignore[arg-type]
    assert truncate(pair, needed, how, BOS) is not None  # type: ignore[arg-type]
    assert truncate(pair, needed - 1, how, BOS) is None  # type: ignore[arg-type]


@given(lengths, lengths, lengths, st.integers(2, 45), st.sampled_from(["prompt_start", "response_end"]), st.booleans())
def test_every_truncated_pair_fits_and_keeps_a_prompt_and_responses(
    prompt: int, chosen: int, rejected: int, limit: int, how: str, masked: bool
) -> None:
    cut = truncate(make_pair(prompt, chosen, rejected, masked=masked), limit, how, BOS)  # type: ignore[arg-type]
    if cut is not None:
        assert example_length(cut) <= limit
        assert min(len(cut.prompt_ids), len(cut.chosen.ids), len(cut.rejected.ids)) >= 1
        assert cut.chosen.mask is None or len(cut.chosen.mask) == len(cut.chosen.ids)
        assert cut.rejected.mask is None or len(cut.rejected.mask) == len(cut.rejected.ids)
