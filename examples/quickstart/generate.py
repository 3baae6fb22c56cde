"""Answer a question with an exported model, with transformers alone.

python examples/quickstart/generate.py output/quickstart/exported "How do I boil an egg?"
"""

from __future__ import annotations

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/quickstart/generate.py DIRECTORY QUESTION")
    disable_progress_bar()
    _, directory, question = sys.argv
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=32)
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
