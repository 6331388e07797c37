"""Faults that are planted in the passes, one at a time, to see whether the property suite finds them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`old`, which stands exactly once in `file` (below `picompile_passes`), becomes `new`."""

    name: str
    file: str
    old: str
    new: str


FAULTS: tuple[Fault, ...] = (
    # Capture's leftovers.
    Fault(
        "removes casts that change the dtype",
        "passes/canonicalize/remove_copies.py",
        'return bool(node.meta["val"].dtype == node.all_input_nodes[0].meta["val"].dtype)',
        "return True",
    ),
    # Matrix products.
    Fault(
        "drops the bias of a product",
        "passes/canonicalize/raise_linear.py",
        'return values["input"], values["weight"], values["bias"]',
        'return values["input"], values["weight"], None',
    ),
    Fault(
        "forgets to transpose",
        "passes/canonicalize/raise_linear.py",
        "weight = _plain(rewriter, matrix, node, transposed=not is_call(node, _aten.linear.default))",
        "weight = _plain(rewriter, matrix, node)",
    ),
    Fault(
        "looks ids up one row late",
        "passes/canonicalize/raise_linear.py",
        "rewriter.call(EMBEDDING, (ids, weight, 0), before=node, sources=(node,))",
        "rewriter.call(EMBEDDING, (ids, weight, 1), before=node, sources=(node,))",
    ),
    Fault(
        "drops a bias that is added after the product",
        "passes/canonicalize/raise_linear.py",
        "new = rewriter.call(LINEAR, (x, weight, bias), before=node, sources=(product, node))",
        "new = product",
    ),
    # Norms.
    Fault(
        "uses one eps for all norms",
        "passes/canonicalize/raise_norms.py",
        "return square.args[0], float(eps)\n    if is_call(square, _MUL)",
        "return square.args[0], 1e-6\n    if is_call(square, _MUL)",
    ),
    Fault(
        "drops the weight of a norm",
        "passes/canonicalize/raise_norms.py",
        "_emit_rms_norm(rewriter, product, x, weight, eps, (normed, product))",
        "_emit_rms_norm(rewriter, product, x, None, eps, (normed, product))",
    ),
    Fault(
        "drops the bias of a layer norm",
        "passes/canonicalize/raise_norms.py",
        'vectors = (values["weight"], values["bias"])',
        'vectors = (values["weight"], None)',
    ),
    Fault(
        "normalizes all heads as one",
        "passes/canonicalize/raise_norms.py",
        "call(op, flat, *wide, eps, layout.groups)",
        "call(op, flat, *wide, eps, 1)",
    ),
    Fault(
        "takes deviations from the mean for values",
        "passes/canonicalize/raise_norms.py",
        "rewriter.replace(node, _normalized(rewriter, LAYER_NORM, node, centered, (weight, None), eps, sources))",
        "rewriter.replace(node, _normalized(rewriter, RMS_NORM, node, centered, (weight,), eps, sources))",
    ),
    # Attention that is written out.
    Fault(
        "forgets the scale of scores",
        "passes/canonicalize/raise_scores.py",
        'attended.kwargs = {"scale": scores.scale}',
        'attended.kwargs = {"scale": 1.0}',
    ),
    Fault(
        "forgets the mask of scores",
        "passes/canonicalize/raise_scores.py",
        "(*sides, mask), before=result",
        "(*sides, None), before=result",
    ),
    # Arithmetic.
    Fault(
        "divides the wrong way",
        "passes/canonicalize/raise_elementwise.py",
        '_aten.div.Tensor: _binary("div"),',
        '_aten.div.Tensor: _binary("div", "other", "self"),',
    ),
    Fault(
        "drops a factor",
        "passes/canonicalize/raise_elementwise.py",
        '_aten.mul.Tensor: _binary("mul"),',
        '_aten.mul.Tensor: lambda write, values: write("mul", values["self"], 1.0),',
    ),
    Fault(
        "looks rows by position up one row late",
        "passes/canonicalize/raise_elementwise.py",
        "args = (positions, weight, 0)",
        "args = (positions, weight, 1)",
    ),
    Fault(
        "takes values that others read into a region",
        "passes/canonicalize/raise_elementwise.py",
        "inside = all(user in region.nodes for user in node.users)",
        "inside = True",
    ),
    # Attention.
    Fault(
        "makes windows one token narrower",
        "passes/canonicalize/masks.py",
        "window = 0 if width == forms.tokens else width",
        "window = 0 if width == forms.tokens else width - 1",
    ),
    Fault(
        "forgets windows",
        "passes/canonicalize/masks.py",
        "window = 0 if width == forms.tokens else width",
        "window = 0",
    ),
    Fault(
        "forgets slopes",
        "passes/canonicalize/masks.py",
        "slopes.to(torch.float32).clone() if matter else None",
        "None",
    ),
    Fault(
        "gives slopes the wrong sign",
        "passes/canonicalize/masks.py",
        "slopes.to(torch.float32).clone()",
        "-slopes.to(torch.float32)",
    ),
    Fault(
        "drops arguments that are given by name",
        "passes/canonicalize/flatten_tokens.py",
        "args = list(arguments(node).values()) if node.kwargs else list(node.args)",
        "args = list(node.args)",
    ),
    Fault(
        "scales by the head size instead of its root",
        "passes/canonicalize/raise_attention.py",
        'scale = 1.0 / math.sqrt(q.meta["val"].shape[-1])',
        'scale = 1.0 / float(q.meta["val"].shape[-1])',
    ),
    Fault(
        "numbers layers from one",
        "passes/canonicalize/raise_attention.py",
        "in enumerate(zip(found, repeats, strict=True)):",
        "in enumerate(zip(found, repeats, strict=True), start=1):",
    ),
    Fault(
        "takes neighbouring key heads for repeated ones",
        "passes/canonicalize/raise_attention.py",
        "if heads % size == 0 and all(map(_repeats_every(size), _tensors(form))):",
        "if heads % size == 0:",
    ),
    # Rotary embeddings.
    Fault(
        "forgets the factor of a query",
        "passes/canonicalize/raise_rotary.py",
        "scale *= factor  # type: ignore[operator]",
        "pass",
    ),
    Fault(
        "forgets the factor of a rotation",
        "passes/canonicalize/raise_rotary.py",
        "args = (value, self._positions, frequencies, count, factor)",
        "args = (value, self._positions, frequencies, count, 1.0)",
    ),
    Fault(
        "takes neighbours for halves",
        "passes/canonicalize/raise_rotary.py",
        "if not torch.equal(side.rotation.columns, torch.arange(side.columns[0])):",
        "if False:",
    ),
    Fault(
        "gives every head the same own elements",
        "passes/canonicalize/raise_rotary.py",
        "torch.where(mine, columns, 0)",
        "torch.where(mine, columns % 2, 0)",
    ),
    Fault(
        "turns the wrong way",
        "passes/canonicalize/raise_rotary.py",
        "rotation = Rotation(own[:, order].flatten(), order, factor, cosine[:, 0, first], -sine[:, 0, first])",
        "rotation = Rotation(own[:, order].flatten(), order, factor, cosine[:, 0, first], sine[:, 0, first])",
    ),
    # Feed-forward blocks.
    Fault(
        "swaps gate and up",
        "passes/canonicalize/raise_ffn.py",
        'gate, up = (second, first) if first[1] == "identity" else (first, second)',
        'gate, up = (first, second) if first[1] == "identity" else (second, first)',
    ),
    Fault(
        "drops the bias of the down projection",
        "passes/canonicalize/raise_ffn.py",
        "biases = (gate_bias, up_bias, down_bias)",
        "biases = (gate_bias, up_bias, None)",
    ),
    Fault(
        "swaps the biases of gate and up",
        "passes/canonicalize/raise_ffn.py",
        "biases = (gate_bias, up_bias, down_bias)",
        "biases = (up_bias, gate_bias, down_bias)",
    ),
    Fault(
        "forgets that up has an activation too",
        "passes/canonicalize/raise_ffn.py",
        "return _RaisedFfn(x, gate[0], up[0], down, gate[1], up[1])",
        'return _RaisedFfn(x, gate[0], up[0], down, gate[1], "identity")',
    ),
    Fault(
        "gives all blocks the number of the first layer",
        "passes/canonicalize/raise_ffn.py",
        "block.emit(rewriter, constants, layer)",
        "block.emit(rewriter, constants, 0)",
    ),
    Fault(
        "takes tanh's GELU for the exact one",
        "passes/canonicalize/raise_ffn.py",
        "_TOLERANCE = 1e-5",
        "_TOLERANCE = 1e-2",
    ),
    # Flattening.
    Fault(
        "takes the columns of a part in reverse",
        "passes/canonicalize/flatten_tokens.py",
        'rows = self._constants.get("rows", table, root)',
        'table = table.flip(0)\n        rows = self._constants.get("rows", table, root)',
    ),
    Fault(
        "drops the bias of a part",
        "passes/canonicalize/flatten_tokens.py",
        'selected(values["weight"]), selected(values["bias"])]',
        'selected(values["weight"]), None]',
    ),
    Fault(
        "forgets the offset of positions",
        "passes/canonicalize/flatten_tokens.py",
        "return positions, offset + int(shift[0])",
        "return positions, offset",
    ),
    Fault(
        "forgets the layer of a block",
        "passes/canonicalize/flatten_tokens.py",
        'return node.meta.get("layer")',
        "return None",
    ),
    # Inputs that are left out.
    Fault(
        "drops the bias of a projection that leaves out inputs",
        "passes/skip_inputs.py",
        "call = (x, rows, limits, bias)",
        "call = (x, rows, limits, None)",
    ),
    Fault(
        "forgets the layer of a projection that leaves out inputs",
        "passes/skip_inputs.py",
        "call, before=node, sources=(node,), layer=layer)",
        "call, before=node, sources=(node,))",
    ),
    # Predictors.
    Fault(
        "gives the threshold the wrong sign",
        "passes/insert_predictors.py",
        "threshold = activation.threshold if",
        "threshold = -activation.threshold - 0.01 if",
    ),
    Fault(
        "decides by up where there is a gate",
        "graph/operands.py",
        'return "up" if block["gate"] is None else "gate"',
        'return "up"',
    ),
    Fault(
        "predicts without the bias",
        "graph/operands.py",
        'weights = [block[side], block[f"{side}_bias"]] if with_bias else [block[side]]',
        "weights = [block[side]]",
    ),
    Fault(
        "predicts for activations that are never silent",
        "passes/insert_predictors.py",
        'name = "exact" if activation.sparse else "none"',
        'name = "exact"',
    ),
    Fault(
        "counts the signs of the bias too",
        "passes/insert_predictors.py",
        "with_bias=kind.reads_bias)",
        "with_bias=True)",
    ),
    Fault(
        "predicts from this block where it was told the one before",
        "passes/insert_predictors.py",
        "inputs.get(layer - 1)",
        "inputs.get(layer)",
    ),
    Fault(
        "predicts from what the norm makes where it was told what it reads",
        "passes/insert_predictors.py",
        'stream_of(x) if asked == "stream"',
        'x if asked == "stream"',
    ),
    Fault(
        "forgets the threshold of a layer",
        "passes/insert_predictors.py",
        "self.thresholds.get(layer, kind.threshold)",
        "kind.threshold",
    ),
    Fault(
        "calls the weights of all predictors alike",
        "passes/insert_predictors.py",
        'f"{PREDICTORS}{layer}.{name}"',
        'f"{PREDICTORS}0.{name}"',
    ),
    Fault(
        "swaps the dimensions of a predictor's weights",
        "passes/insert_predictors.py",
        "[sizes[letter] for letter in letters]",
        "[sizes[letter] for letter in reversed(letters)]",
    ),
    Fault(
        "says that nothing changes where neurons are skipped",
        "passes/insert_predictors.py",
        "return Effect.EXACT if lossless else Effect.SKIPS",
        "return Effect.EXACT",
    ),
    Fault(
        "puts a predictor in front of the first block only",
        "passes/insert_predictors.py",
        "for block in blocks:",
        "for block in blocks[:1]:",
    ),
    Fault(
        "says that it modified what it did not",
        "passes/insert_predictors.py",
        "for block in blocks:\n            self._insert",
        "rewriter.changes += 1\n        for block in blocks:\n            self._insert",
    ),
    # Partition.
    Fault(
        "shifts the table of hot neurons by one",
        "passes/partition.py",
        '"hot", chosen.nonzero().flatten(), values)',
        '"hot", (chosen.nonzero().flatten() + 1) % total, values)',
    ),
    Fault(
        "shifts both tables by one",
        "passes/partition.py",
        "chosen[list(hot)] = True",
        "chosen[[(neuron + 1) % total for neuron in hot]] = True",
    ),
    Fault(
        "keeps a neuron twice",
        "passes/partition.py",
        "(~chosen).nonzero()",
        "(~chosen | (torch.arange(total) == hot[0])).nonzero()",
    ),
    Fault(
        "loses a cold neuron",
        "passes/partition.py",
        "(~chosen).nonzero().flatten()",
        "(~chosen).nonzero().flatten()[1:]",
    ),
    Fault(
        "adds the bias of down in both parts",
        "passes/partition.py",
        'values | {"down_bias": None}',
        "values",
    ),
    Fault(
        "adds the bias of down in no part",
        "passes/partition.py",
        '"hot", chosen.nonzero().flatten(), values)',
        '"hot", chosen.nonzero().flatten(), values | {"down_bias": None})',
    ),
    Fault(
        "selects rows of up for the gate",
        "passes/partition.py",
        "selected = {name: select(values[name]) for name",
        'selected = {name: select(values["up" if name == "gate" else name]) for name',
    ),
    Fault(
        "leaves the order of down's rows as it was",
        "passes/partition.py",
        "selected = {name: select(values[name]) for name",
        'selected = {name: select(values[name]).args[0] if name == "down" else select(values[name]) for name',
    ),
    Fault(
        "does not say which rows of a whole mask a part has",
        "passes/partition.py",
        'masked: dict[str, Any] = {"neurons": table}',
        'masked: dict[str, Any] = {"neurons": None}',
    ),
    Fault(
        "splits a predictor whose neurons share weights",
        "passes/partition.py",
        'if predictor_kind(predictor["kind"]).row_local:',
        "if True:",
    ),
    Fault(
        "keeps the cold part only",
        "passes/partition.py",
        "rewriter.replace(block, rewriter.call(ADD, parts, before=block, sources=(block,)))",
        "rewriter.replace(block, parts[1])",
    ),
    Fault(
        "takes hot for cold where a layer has one part",
        "passes/partition.py",
        'device = "hot" if hot else "cold"',
        'device = "cold" if hot else "hot"',
    ),
    Fault(
        "forgets the layer of a part",
        "passes/partition.py",
        "(SPARSE_FFN, operands, before=block, sources=(block,), layer=layer, device=device)",
        "(SPARSE_FFN, operands, before=block, sources=(block,), device=device)",
    ),
    # Quantization.
    Fault(
        "reads rows as columns",
        "passes/quantize.py",
        'columns = int(weight.meta["val"].shape[1])',
        'columns = int(weight.meta["val"].shape[0])',
    ),
    Fault(
        "packs in one format and unpacks in another",
        "passes/quantize.py",
        "data = rewriter.call(QUANTIZE, (weight, form)",
        'data = rewriter.call(QUANTIZE, (weight, "q8")',
    ),
    Fault(
        "packs tied weights twice",
        "passes/quantize.py",
        "key = _constant_key(weight)",
        "key = (weight, user)",
    ),
    Fault(
        "takes different rows of one weight for the same",
        "passes/quantize.py",
        "return (node.op, node.target, key(node.args), key(tuple(sorted(node.kwargs.items()))))",
        "return (node.op, node.target, node.all_input_nodes[0].target)",
    ),
    Fault(
        "skips the weights of predictors",
        "passes/quantize.py",
        "elif isinstance(value, (list, tuple)) and old in value:",
        "elif False:",
    ),
    Fault(
        "skips the head",
        "passes/quantize.py",
        "for user in list(rewriter.graph.nodes):",
        "for user in list(rewriter.graph.nodes)[:-2]:",
    ),
    Fault(
        "packs again what is packed",
        "passes/quantize.py",
        "if is_call(weight, DEQUANTIZE):",
        "if False:",
    ),
    # What all passes share.
    Fault(
        "gives a new parameter data",
        "graph/rewriter.py",
        'torch.empty(tuple(shape), device="meta")',
        "torch.zeros(tuple(shape))",
    ),
    Fault(
        "does not say from what a node was made",
        "graph/rewriter.py",
        "tuple(dict.fromkeys(self._origins(sources))))",
        "())",
    ),
    Fault(
        "does not say which module a node comes from",
        "graph/rewriter.py",
        '_INHERITED_META = ("nn_module_stack", "stack_trace")',
        "_INHERITED_META = ()",
    ),
    Fault(
        "changes the graph it was given",
        "base.py",
        "copy.deepcopy(graph_module.graph)",
        "graph_module.graph",
    ),
    Fault(
        "keeps weights that nothing reads",
        "base.py",
        "graph_module.graph.eliminate_dead_code()",
        "graph_module.graph.lint()",
    ),
    Fault(
        "forgets to move on to its stage",
        "base.py",
        "set_stage(result, ensured)",
        "set_stage(result, stage)",
    ),
)
