"""Tokens that end an answer."""

from picompile.frontend.end_tokens import goes_on, named_end_tokens, with_end_tokens


def test_special_tokens_whose_names_end_an_answer() -> None:
    assert named_end_tokens({"<|im_end|>": 7, "<|im_start|>": 6, "<|endoftext|>": 2}) == (2, 7)
    assert named_end_tokens({"<|end|>": 3, "<|endoftext|>": 1}) == (1, 3)


def test_tokens_between_parts_of_one_answer() -> None:
    harmony = {"<|return|>": 2, "<|call|>": 12, "<|end|>": 7, "<|start|>": 6}
    assert goes_on(harmony) == {"<|end|>"}
    assert named_end_tokens(harmony) == (2, 12)
    assert named_end_tokens({"<|tool_response>": 9, "</s>": 212, "<eos>": 1}) == (1, 9)


def test_generation_config_lists_each_end_token_once() -> None:
    assert with_end_tokens({"eos_token_id": 5, "top_k": 3}, (2, 5, 2)) == {"top_k": 3, "eos_token_id": [2, 5]}
    assert with_end_tokens({"eos_token_id": None}, ()) == {}
