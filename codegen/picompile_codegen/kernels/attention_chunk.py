def attend_chunk(shape, tensors, tokens): raise NotImplementedError
