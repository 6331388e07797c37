"""Small language models that fire sparsely: their text, their shapes, their training and their measure."""
