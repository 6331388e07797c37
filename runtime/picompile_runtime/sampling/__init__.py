"""From logits to text: sampling, generation, tokenizers and chat templates."""
