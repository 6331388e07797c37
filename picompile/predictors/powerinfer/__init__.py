"""Import of predictors that others have trained.

The formats are PowerInfer's (https://github.com/SJTU-IPADS/PowerInfer at d3ebd7c); there are no others:

- *PowerInfer GGUF*: a model with its predictors, `blk.N.fc1.weight` [r, D] and `blk.N.fc2.weight` [F, r]; the first
  four bytes of the file are `PWRI` instead of `GGUF`. Written by convert.py and convert-hf-to-powerinfer-gguf.py.
- A folder of predictors: `model_N.pt` with `fc1.weight` and `fc2.weight`, and `config.json` with `sparse_threshold`.
- `activation/activation_N.pt`: how often each neuron of layer N fired.

A neuron is computed unless fc2·relu(fc1·s) < threshold (default 0), where s is the input of the norm before the block;
there are no biases (llm_build_ffn_sparse in llama.cpp, ggml_compute_forward_mul_mat_sparse in ggml.c).

Such files are assumed hostile. Their headers are checked here, by code that never reads past the end of a file and
imports nothing heavy. Only then are tensors read: those of a GGUF file as those of a model are, and pickles by another
process, with limits on its memory and time; its result is a safetensors file.
"""
