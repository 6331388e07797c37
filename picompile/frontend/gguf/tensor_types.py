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
    42: ("Q2_0", 64, 18),
}

# PowerInfer left llama.cpp before it had the types from 16 on, and its integers had these numbers: ggml.h at d3ebd7c.
POWERINFER_TYPES = {number: row for number, row in TENSOR_TYPES.items() if number < 16} | {
    16: ("I8", 1, 1),
    17: ("I16", 1, 2),
    18: ("I32", 1, 4),
}

# Types that are not read, of which the size of a block is not known here: llama.cpp's that are gone from its files, and
# those of ik_llama.cpp (ggml/include/ggml.h of ikawrakow/ik_llama.cpp). 36 has been both.
REMOVED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
OTHER_TYPES = {
    36: "I2_S",
    97: "Q8_0_X4",
    98: "Q8_1_X4",
    99: "Q8_2_X4",
    133: "Q6_0",
    134: "IQ1_BN",
    135: "IQ2_BN",
    136: "Q8_K64",
    137: "IQ2_K",
    138: "IQ3_K",
    139: "IQ4_K",
    140: "IQ5_K",
    141: "IQ6_K",
    142: "IQ2_TN",
    143: "IQ1_TN",
    144: "IQ4_KS",
    145: "IQ2_KS",
    146: "IQ4_KSS",
    147: "Q8_K16",
    148: "Q8_K32",
    149: "Q8_KR8",
    150: "Q8_K128",
    151: "Q8_KV",
    152: "IQ5_KS",
    153: "IQ2_KT",
    154: "IQ3_KT",
    155: "IQ4_KT",
    156: "IQ3_KS",
    157: "IQ2_KL",
    158: "IQ1_KT",
    202: "Q4_0_R8",
    206: "Q5_0_R4",
    208: "Q8_0_R8",
    210: "Q2_K_R4",
    211: "Q3_K_R4",
    212: "Q4_K_R4",
    213: "Q5_K_R4",
    214: "Q6_K_R4",
    216: "IQ2_XXS_R4",
    217: "IQ2_XS_R4",
    218: "IQ3_XXS_R4",
    219: "IQ1_S_R4",
    220: "IQ4_NL_R4",
    221: "IQ3_S_R4",
    222: "IQ2_S_R4",
    223: "IQ4_XS_R8",
    229: "IQ1_M_R4",
    230: "BF16_R16",
    233: "Q6_0_R4",
    335: "IQ2_BN_R4",
    337: "IQ2_K_R4",
    338: "IQ3_K_R4",
    339: "IQ4_K_R4",
    340: "IQ5_K_R4",
    344: "IQ4_KS_R4",
    352: "IQ5_KS_R4",
    353: "MXFP4_R8",
    397: "Q8_K_R16",
    398: "Q8_KV_R8",
    399: "Q8_K_R8",
}


def unread_type(number: int) -> str:
    """Return what a tensor type that `TENSOR_TYPES` lacks is, and what to do, for an error."""
    if number in REMOVED_TYPES:
        return f"type {number}, {REMOVED_TYPES[number]}, which llama.cpp has no longer; convert the model anew"
    if number in OTHER_TYPES:
        name = OTHER_TYPES[number]
        return f"type {number}, {name} of ik_llama.cpp, which is not read; take a file of llama.cpp's types, as Q4_K_M"
    return f"type {number}, which is not known"
