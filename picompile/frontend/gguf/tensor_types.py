"""The first bytes of GGUF files, and their numbers for types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

# llama.cpp's files, and PowerInfer's, which have predictors as well.
GGUF_MAGIC, POWERINFER_MAGIC = b"GGUF", b"PWRI"
MAGICS = (GGUF_MAGIC, POWERINFER_MAGIC)

# struct's letter for each type of a metadata value; strings (8) and arrays (9) are read otherwise.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, FLOAT32, STRING, ARRAY, FLOAT64 = 4, 6, 8, 9, 12

# Number of a tensor type → its name, the elements of a block, and the bytes of a block.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}

# PowerInfer left llama.cpp before it had the types from 16 on, and its integers had these numbers: ggml.h at d3ebd7c.
POWERINFER_TYPES = {number: row for number, row in TENSOR_TYPES.items() if number < 16} | {
    16: ("I8", 1, 1),
    17: ("I16", 1, 2),
    18: ("I32", 1, 4),
}
