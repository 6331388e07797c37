"""Structures: what a compilation makes that follows from everything but the values of weights.

A compilation of a GGUF file spends nearly all of its time on what follows from the file's header and the options: it
captures and proves the model, runs passes, lowers, and compiles kernels. What comes out is kept beside compiled kernels
(`picompile_codegen.build.object_cache`): the artifact without weights and tokenizer, and how each packed tensor is made
of the file's tensors. The next compilation of the same structure packs the weights, and needs neither transformers nor
TVM.

| module | is about |
| --- | --- |
| `key` | all that a structure follows from, and when none is kept |
| `record` | a kept structure: its parts, and its bytes |
| `constants` | the constant subgraphs that packed tensors are made of, as JSON |
| `keep` | the structure of an artifact that was made in the long way |
| `use` | an artifact from a kept structure |
| `tokenizer` | the tokenizer of a file, kept by all that it is made of |

Nothing is kept, and nothing kept is used, where more decides: texts, predictors, plans, checks of accuracy, passes of
the user's or packages of plug-ins. An artifact has the same bytes either way.
"""
