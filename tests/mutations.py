"""Deliberate faults, put into a copy of the package one at a time, and the tests that find each.

    python tests/mutations.py                 every fault
    python tests/mutations.py gauge bias      those with one of these words in their file or name

The working tree is left alone. A fault that no test finds, or whose text is no longer in its file,
is an error: a test is missing, or this list has to follow the code.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

os.environ["OMP_NUM_THREADS"] = "1"

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "lightning_unitscale"
# Files that the tests read, without the environment and logs.
COPIED = (
    PACKAGE,
    "tests",
    "examples",
    "configs",
    "benchmarks",
    "pyproject.toml",
    "constraints.txt",
)
TIMEOUT = 300
# Imported once, for all the processes that are forked from here.
PRELOADED = ("torch._dynamo", "torch._inductor.compile_fx", "lightning.pytorch", "scipy.sparse")

# The tests of a fault have to pass without it.
Outcome = Literal["found", "survived", "stale", "tests fail"]


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        fault: The fault in words.
        file: File of the package.
        text: Text of the file, which occurs once.
        replacement: Text that replaces it.
        tests: Arguments of pytest, below ``tests``: files or tests, one of which must fail.
    """

    fault: str
    file: str
    text: str
    replacement: str
    tests: str


MUTATIONS = (
    # Units and the gauge.
    Mutation(
        "gradient units enter factors with the wrong sign",
        "matmuls/gauge.py",
        "+ gradient.log2_gamma",
        "- gradient.log2_gamma",
        "matmuls/test_gauge.py",
    ),
    Mutation(
        "units are rounded down, not to the nearest power of two",
        "matmuls/gauge.py",
        "round(math.log2(rms))",
        "math.floor(math.log2(rms))",
        "matmuls/test_gauge.py",
    ),
    Mutation(
        "sums in FP16 overflow in units where they fit as they are",
        "matmuls/execute.py",
        '        return device in ("cpu", "cuda")',
        "        return False",
        "callbacks/test_half_precision.py -k stay_finite",
    ),
    Mutation(
        "a factor for gradients waits for the second step's numbers",
        "callbacks/rule_scaling.py",
        "        if not is_first:\n            return\n",
        "        return\n",
        "callbacks/test_late_rules.py callbacks/test_rules_training.py",
    ),
    Mutation(
        "a gradient of FP16 is multiplied by a factor that is none of FP16",
        "rules/unit_weights.py",
        "    if gradient.dtype is torch.float16:\n",
        "    if False:\n",
        "rules/test_unit_weights.py -k exceed_range",
    ),
    Mutation(
        "matmuls of a checkpoint in an eager graph lose their names",
        "capture/executors.py",
        "return forward(*(args[i]",
        "return body.forward(*(args[i]",
        "matmuls/test_simulate.py -k executors_match",
    ),
    Mutation(
        "of a tensor that several calls measure the last one counts alone",
        "matmuls/measurement.py",
        "values.setdefault(name, []).append(rms)",
        "values[name] = [rms]",
        "matmuls/test_measured_operands.py -k twice",
    ),
    # The dispatcher.
    Mutation(
        "the gradients of a convolution's input and weight change units",
        "capture/operators.py",
        """((1, 0, 1), (1, 1, 0), (1, 0, 0)),
        _word("convolution", "input", "weight"),""",
        """((1, 1, 0), (1, 0, 1), (1, 0, 0)),
        _word("convolution", "input", "weight"),""",
        "conformance/test_conformance.py -k layers-conv2d-both",
    ),
    Mutation(
        "the query's gradient is not divided by the query's unit",
        "capture/operators.py",
        "((1, -1, 0, 1), (1, 0, -1, 1)",
        "((1, 0, 0, 1), (1, 0, -1, 1)",
        "conformance/test_conformance.py -k layers-attention_plain-both",
    ),
    Mutation(
        "an addend is multiplied by the units of its matmul",
        "matmuls/execute.py",
        "args[position] = scaled_copy(args[position], exponents[index])",
        "args[position] = scaled_copy(args[position], -exponents[index])",
        "conformance/test_conformance.py -k layers-conv2d-both",
    ),
    Mutation(
        "the RMS is the norm",
        "matmuls/measurement.py",
        "statistics.rms if is_finite",
        "statistics.rms * statistics.numel**0.5 if is_finite",
        "matmuls/test_pieces.py",
    ),
    Mutation(
        "sums that overflow on their way run in units",
        "matmuls/measurement.py",
        "too_large = -limit - _LOG2_TERMS",
        "too_large = -limit",
        "matmuls/test_pieces.py",
    ),
    Mutation(
        "a graph that is compiled leaves its addends in true units",
        "matmuls/joint_units.py",
        "args[position] = self._scaled(args[position], factor_of(index), node, name)",
        "args[position] = args[position]",
        "matmuls/test_aot_pass.py -k submodule",
    ),
    Mutation(
        "a compiled backward pass takes the units in force, not those of its forward pass",
        "matmuls/compiled_graphs.py",
        "return GRAPHS[number].parts(factors)",
        "return GRAPHS[number].parts(GRAPHS[number].factors(factors.device))",
        "matmuls/test_joint_units.py -k its_forward_pass",
    ),
    Mutation(
        "a compiled graph measures an input after it was written",
        "matmuls/aot_pass.py",
        'node.op == "output" or _writes(node)',
        'node.op == "output"',
        "matmuls/test_compiled_runs.py -k measurements_match",
    ),
    Mutation(
        "what is measured in place of a copy in units is taken for the copy",
        "matmuls/compiled_graphs.py",
        "key = which, units[index] if in_units else 0",
        "key = which, units[index]",
        "matmuls/test_compiled_runs.py -k measurements_match",
    ),
    Mutation(
        "a graph from Inductor's cache has the names of another model's modules",
        "matmuls/joint_graphs.py",
        "repr((root, paths, notes))",
        "repr((root, notes))",
        "matmuls/test_cached_graphs.py -k other_names",
    ),
    Mutation(
        "what else reads a gradient of a compiled graph reads it in its unit",
        "matmuls/compiled_runs.py",
        "return [*self.rule.exponents(units), *back]",
        "return [*self.rule.exponents(units), *(0 for _ in back)]",
        "matmuls/test_joint_units.py -k all_matmuls_are_scaled",
    ),
    Mutation(
        "a compiled backward pass of attention takes another result for that of its forward pass",
        "matmuls/joint_units.py",
        "self.copies[scaled, names[powers.index(1)]] = result",
        "self.copies[scaled, names[powers.index(1)]] = scaled",
        "matmuls/test_joint_units.py -k written_once",
    ),
    Mutation(
        "a measurement of a compiled matmul makes Inductor write a gradient twice",
        "matmuls/aot_pass.py",
        "look.take(matmul, lambda node: node)",
        "look.take(matmul, _whole)",
        "matmuls/test_joint_units.py -k in_16_bits",
    ),
    Mutation(
        "a compiled module saves copies in units beside what they were made of",
        "matmuls/joint_units.py",
        'copies = self._of_inputs if chain[-1].op == "placeholder" else self.copies',
        "copies = self._of_inputs",
        "matmuls/test_joint_units.py -k instead_of",
    ),
    Mutation(
        "a matmul that Inductor adds to something gets its units before that is decided",
        "matmuls/joint_units.py",
        "if not (self._is_fused and _may_join_a_sum(node, matmul.rule))",
        "if True",
        "matmuls/test_joint_units.py -k sum_is_fused",
    ),
    Mutation(
        "a compiled graph has the FP8 layers that it began with",
        "matmuls/compiled_formats.py",
        "guard_by(lambda: compiled.modes_now() == modes, text)",
        "guard_by(lambda: True, text)",
        "matmuls/test_compiled_fp8.py -k decisions",
    ),
    Mutation(
        "a compiled FP8 layer keeps what its backward pass could cast again",
        "matmuls/compiled_fp8.py",
        "if nodes and _is_kept_anyway(cast, self._after_tangents):",
        "if not nodes:",
        "matmuls/test_compiled_fp8.py -k save_no_operand",
    ),
    Mutation(
        "a compiled FP8 layer keeps 16 bits of what nothing else needs",
        "matmuls/compiled_fp8.py",
        "return all(not after_tangents.isdisjoint(_readers(leaf, own)) for leaf in leaves)",
        "return True",
        "matmuls/test_compiled_fp8.py -k saved_in_fp8",
    ),
    Mutation(
        "a rounded matmul of a compiled graph takes the call of another one",
        "matmuls/compiled_formats.py",
        "number = run + matmul.forward",
        "number = run + matmul.forward * matmul.is_backward",
        "matmuls/test_compiled_formats.py -k twice",
    ),
    Mutation(
        "compilers remember kernels that were taken away",
        "matmuls/torch_internals.py",
        "for overload in self._overloads:",
        "for overload in ():",
        "matmuls/test_compiled_formats.py -k after_detach",
    ),
    Mutation(
        "modules of one class share the names of the first in compiled graphs",
        "matmuls/compiled_runs.py",
        "((_moved(names.path, self._root, path), names.word), names.roles)",
        "((names.path, names.word), names.roles)",
        "matmuls/test_compiled_sharing.py -k blocks",
    ),
    Mutation(
        "a compiled backward pass measures its matmuls for the module that ran last",
        "matmuls/compiled_graphs.py",
        "now.run, now.operators = found or now.run, set()",
        "now.run, now.operators = now.run, set()",
        "matmuls/test_compiled_sharing.py -k nested",
    ),
    Mutation(
        "what was compiled in a plain run stays without units",
        "matmuls/compiler_internals.py",
        "if always or not _Compiled.for_sessions.issuperset(range(_Compiled.first, number)):",
        "if always:",
        "matmuls/test_aot_pass.py -k compiled_before",
    ),
    Mutation(
        "what another thread than that of attach compiles stays without units",
        "matmuls/scaled_methods.py",
        "        install_passes()\n",
        "",
        "matmuls/test_compiled_sharing.py -k in_user_thread",
    ),
    Mutation(
        "nodes that two threads have given one number are taken for one",
        "matmuls/autograd_nodes.py",
        "node.metadata.setdefault(_IDENTITY, next(_IDENTITIES))",
        "node.metadata.setdefault(_IDENTITY, 0)",
        "matmuls/test_threads.py -k second_derivatives",
    ),
    Mutation(
        "a node of a plain model is that of a session in another thread",
        "matmuls/calls.py",
        "    return makers.get(calling_thread())",
        "    return next(iter(makers.values()))",
        "matmuls/test_threads.py -k inside_step",
    ),
    Mutation(
        "the last copy of a gradient on an engine's thread is kept for ever",
        "matmuls/execute.py",
        "    _LAST.clear()",
        "    _LAST.pop(get_ident(), None)",
        "matmuls/test_threads.py -k are_freed",
    ),
    Mutation(
        "a graph goes on in the units of a session that has ended",
        "matmuls/calls.py",
        "return recorded if session is None or session.is_open else None",
        "return recorded",
        "matmuls/test_lifetimes.py -k session_ended",
    ),
    Mutation(
        "what is known of each matmul is kept beyond its graph",
        "matmuls/calls.py",
        "            CALLS.pop(key, None)\n            return recorded",
        "            return recorded",
        "matmuls/test_lifetimes.py -k freed_with_graph",
    ),
    Mutation(
        "a copy in units closes the gaps of its source",
        "matmuls/execute.py",
        "        if is_kept:\n",
        "        if is_kept or strides is not None:\n",
        "matmuls/test_pieces.py -k keeps_strides",
    ),
    Mutation(
        "the first of two threads that need fused layers opened closes them for both",
        "capture/patches.py",
        "if len(_opened) == 1:",
        "if _opened:",
        "matmuls/test_threads.py -k setting",
    ),
    Mutation(
        "what a reentrant checkpoint computes again is not watched",
        "monitor/torch_state.py",
        "    with shadowed(CheckpointFunction, forward=forward):",
        "    with shadowed(CheckpointFunction):",
        "monitor/test_same_bits.py -k NestedReentrant",
    ),
    Mutation(
        "what a backward matmul is added to is not measured",
        "matmuls/units.py",
        "range(len(known), len(known) + num_addends) if is_whole",
        "() if is_whole",
        "matmuls/test_user_code.py -k range",
    ),
    Mutation(
        "what a masked convolution does not read is measured and copied",
        "capture/operators.py",
        "if any(powers and powers[k] for powers in made_of)]",
        "]",
        "matmuls/test_unread_operands.py -k masked_convolution",
    ),
    Mutation(
        "an addend times zero is measured",
        "capture/operators.py",
        'kwargs.get("beta", 1) == 0',
        'kwargs.get("beta", 1) is None',
        "matmuls/test_unread_operands.py -k addends_times_zero",
    ),
    Mutation(
        "matrices that an empty one is multiplied by are measured",
        "matmuls/execute.py",
        "least = least and tensor.numel()",
        "least = 1",
        "matmuls/test_unread_operands.py -k empty_matrices",
    ),
    Mutation(
        "a saved operand is taken for the gradient",
        "matmuls/steady.py",
        "addresses[place] != known[saved] or addresses[1 - place] in known",
        "False",
        "matmuls/test_steady.py",
    ),
    Mutation(
        "what lies beyond the last group is measured",
        "capture/operators.py",
        "% end.clamp(min=1)",
        "",
        "capture/test_operators.py -k last_group",
    ),
    Mutation(
        "a matmul that is written into a tensor is written into another",
        "matmuls/kernels.py",
        '        rule = replace(rule, with_factor="")',
        "        pass",
        "matmuls/test_user_code.py -k out_argument_are_scaled",
    ),
    Mutation(
        "a checkpoint of depth 'all' keeps its gradient scale of 1",
        "callbacks/checkpoints.py",
        "checkpoint.pop(name, None) is not None",
        "checkpoint.get(name) is not None",
        "callbacks/test_half_precision.py -k of_depth_all",
    ),
    Mutation(
        "an eps that is zero in the parameters' type is not warned of",
        "callbacks/trainer_settings.py",
        "torch.tensor(eps, dtype=dtype) == 0",
        "eps == 0",
        "callbacks/test_half_precision.py -k precision_warnings",
    ),
    Mutation(
        "a layer that leaves FP8 later is not counted",
        "callbacks/matmul_units.py",
        "        if is_counted or session.format:",
        "        if is_counted:",
        "callbacks/test_lost_formats.py -k falling_coverage",
    ),
    Mutation(
        "FP8 is decided by the first weight for good",
        "matmuls/fp8_linear.py",
        "if name not in self._config.decisions or self._decided_by.get(name) != decided_by:",
        "if name not in self._config.decisions:",
        "callbacks/test_lost_formats.py -k shape_in_one_step",
    ),
    Mutation(
        "a pipeline's losses are not weighted by their targets",
        "pipeline/whole_batch.py",
        "            weights = len(microbatches) * counts / counts.sum()",
        "            weights = torch.ones_like(counts)",
        "pipeline/test_whole_batch.py -k tokens",
    ),
    Mutation(
        "a rehearsal leaves attributes of parameters changed",
        "capture/rollback.py",
        "            waiting.append((path, vars(parameter)))",
        "            pass",
        "capture/test_rollback.py",
    ),
    Mutation(
        "settings follow the rules of a model that they cannot scale",
        "callbacks/rule_scaling.py",
        "                self.settings.restore()\n                step.fallback",
        "                step.fallback",
        "callbacks/test_rules_plain.py",
    ),
    Mutation(
        "a copied module has the factors of the module that it was made of",
        "capture/module_steps.py",
        '            if getattr(hook, "__torch_unserializable__", False):\n',
        "            if False:\n",
        "rules/test_unit_weights.py -k transformed_copy",
    ),
    Mutation(
        "captured steps share what Dynamo keeps with other modules of their class",
        "capture/graph_variants.py",
        "capture.with_own_code(function)",
        "function",
        "matmuls/test_lost_formats.py -k limit_of_class",
    ),
    Mutation(
        "a step that is captured in most calls goes on so",
        "capture/captured_step.py",
        "self.fallback.stay_plain(too_many)",
        "pass",
        "callbacks/test_recaptures.py -k each_call",
    ),
    Mutation(
        "a step that is captured at times is given up",
        "capture/module_state.py",
        "4 * self._num_captures <= 3 * self._num_calls",
        "False",
        "callbacks/test_recaptures.py -k occasionally",
    ),
    Mutation(
        "Dynamo runs a step as it is that rules have scaled, beyond its limit",
        "capture/module_state.py",
        "        if most < max(",
        "        if True or most < max(",
        "callbacks/test_recaptures.py -k never_disables",
    ),
    Mutation(
        "a step is cut into any number of graphs",
        "capture/module_state.py",
        "if self.num_graphs < MANY_GRAPHS:",
        "if True:",
        "callbacks/test_recaptures.py -k many_graphs",
    ),
    Mutation(
        "a step runs captured though a hook takes part in its backward pass",
        "capture/fallback.py",
        "looks and self._num_hooks != RemovableHandle.next_id:",
        "False:",
        "callbacks/test_fallbacks.py -k GradientNoise",
    ),
    Mutation(
        "a failed attempt to capture a step is not undone",
        "capture/fallback.py",
        "            undo()",
        "            pass",
        "callbacks/test_fallbacks.py -k FailsToCompile",
    ),
    Mutation(
        "a step that is undone in its backward pass logs twice",
        "capture/fallback.py",
        "        self._step.postponed.discard()  # the call has logged already",
        "        self._step.postponed.replay()",
        "callbacks/test_fallbacks.py -k failed_backward",
    ),
    Mutation(
        "hooks that come later are no reason to capture again",
        "capture/dynamo_capture.py",
        "skip_nnmodule_hook_guards=False",
        "skip_nnmodule_hook_guards=True",
        "callbacks/test_fallbacks.py -k forward_hooks",
    ),
    Mutation(
        "what is flushed is reported at every look",
        "matmuls/rounding.py",
        "            self._levels[name] = level",
        "            pass",
        "callbacks/test_lost_formats.py -k reported_once",
    ),
    Mutation(
        "coverage counts plain matmuls as in units",
        "matmuls/coverage.py",
        'if count.kind in ("units", "format"))',
        'if count.kind in ("units", "format", "plain"))',
        "matmuls/test_pieces.py",
    ),
    Mutation(
        "the gauge is not saved",
        "callbacks/matmul_units.py",
        '"gauge": gauge,',
        '"gauge": {},',
        "callbacks/test_resume.py -k survives_load",
    ),
    Mutation(
        "the gauge is not restored",
        "callbacks/matmul_units.py",
        'restore(gauge, state_dict["plain"], lacking)',
        'restore(Gauge(), state_dict["plain"], lacking)',
        "callbacks/test_resume.py -k survives_load",
    ),
    Mutation(
        "matmuls that have to run plain are not restored",
        "callbacks/matmul_units.py",
        'restore(gauge, state_dict["plain"], lacking)',
        "restore(gauge, {}, lacking)",
        "callbacks/test_resume.py -k survives_load",
    ),
    Mutation(
        "a tensor of zeros has the unit 1",
        "matmuls/measurement.py",
        "return self.rms > 0.0",
        "return self.rms >= 0.0",
        "callbacks/test_late_units.py -k first_nonzero_value",
    ),
    Mutation(
        "a format rounds what has no unit yet in a unit of 1",
        "matmuls/session.py",
        "if not has_all or each.awaits(matmul.names):",
        "if each.awaits(matmul.names):",
        "callbacks/test_late_units.py -k is_not_rounded",
    ),
    Mutation(
        "FP8 casts what it has not seen in its unit",
        "matmuls/fp8_linear.py",
        "numerics.awaits((*names, site.name))",
        "numerics.awaits(names)",
        "callbacks/test_late_units.py -k is_not_rounded",
    ),
    Mutation(
        "each step measures all that a matmul without a unit reads",
        "matmuls/units.py",
        "is_whole = self.is_looking or slot not in site.seen",
        "is_whole = True",
        "callbacks/test_late_units.py -k one_row_per_step",
    ),
    Mutation(
        "a step waits for the numbers of what was zero at first",
        "matmuls/units.py",
        "            if is_late:\n                self._sent = arrived",
        "            if False:\n                self._sent = arrived",
        "callbacks/test_no_waiting.py -k late",
    ),
    Mutation(
        "a rank that lacks no unit meets the others no more",
        "callbacks/distributed.py",
        "any(names) or bool(",
        "bool(names[0]) and bool(",
        "distributed/test_late_units.py",
    ),
    Mutation(
        "a resumed run has forgotten what had no unit",
        "callbacks/matmul_units.py",
        'state_dict.get("lacking", {})',
        "{}",
        "callbacks/test_late_units.py -k resuming",
    ),
    Mutation(
        "a look forgets what the other ranks have measured",
        "callbacks/matmul_units.py",
        "measurement = joint_measured(arrived())",
        "measurement = arrived()",
        "distributed/test_ddp.py",
    ),
    # Graphs: inputs of our own, memory and the order of gradients.
    Mutation(
        "an input of ours stands behind the output of a graph that has no other",
        "capture/copy_graphs.py",
        "graph.inserting_before(first)",
        "graph.inserting_after(None)",
        "monitor/test_probes.py -k without_inputs",
    ),
    Mutation(
        "whether a result has memory of its own is answered the wrong way",
        "capture/aliasing.py",
        "and not _effects(node).views",
        "and bool(_effects(node).views)",
        "capture/test_aliasing.py",
    ),
    Mutation(
        "what reads a view of a tensor that is written into is not seen",
        "capture/aliasing.py",
        "return {node for node, root in roots.items() if root in mutated}",
        "return {node for node in roots if node in mutated}",
        "capture/test_aliasing.py",
    ),
    Mutation(
        "a tensor is written out of place although a view of it is read later",
        "capture/aliasing.py",
        "return is_fresh and not any(node in viewed for viewed in views)",
        "return is_fresh",
        "capture/test_functionalize.py",
    ),
    # What is measured.
    Mutation(
        "a tap hands on another gradient",
        "capture/graph_recorder.py",
        "return grad_output, ctx.on_gradient(grad_output), None, None",
        "return grad_output * 2, ctx.on_gradient(grad_output), None, None",
        "monitor/test_probes.py",
    ),
    Mutation(
        "samples see some channels only",
        "scales/torch_rows.py",
        "while math.gcd(stride, row_length) > 1:",
        "while math.gcd(stride, row_length) > row_length:",
        "scales/test_statistics.py -k stride",
    ),
    Mutation(
        "an overflow that the sample has missed is none",
        "scales/reduce.py",
        "np.copyto(overflow, np.maximum(overflow, least), where=over)",
        "np.copyto(overflow, np.maximum(overflow, 0 * least), where=over)",
        "scales/test_statistics.py -k overflow",
    ),
    Mutation(
        "NaN are not counted",
        "scales/torch_rows.py",
        "tensor.numel() - num_finite - infs,",
        "0 * num_finite,",
        "scales/test_statistics.py -k nonfinite",
    ),
    Mutation(
        "the last element is not summed",
        "scales/torch_rows.py",
        "        exact.sum(),\n",
        "        exact.reshape(-1)[:-1].sum(),\n",
        "scales/test_statistics.py",
    ),
    Mutation(
        "a sample begins anew with each part of a tensor",
        "scales/host_rows.py",
        "wide[-begin % stride :: stride]",
        "wide[::stride]",
        "scales/test_statistics.py -k light_rows",
    ),
    Mutation(
        "a row of a compiled graph waits until its tensor was written",
        "scales/statistics.py",
        " or _may_write(node)",
        "",
        "scales/test_joint_rows.py -k before_in_place_write",
    ),
    Mutation(
        "exponents are one bin off",
        "scales/torch_rows.py",
        "bins = exponent.clamp(MIN_EXPONENT, MAX_EXPONENT) - MIN_EXPONENT",
        "bins = (exponent + 1).clamp(MIN_EXPONENT, MAX_EXPONENT) - MIN_EXPONENT",
        "scales/test_statistics.py",
    ),
    Mutation(
        "of all ranks' extremes one becomes the other",
        "scales/reduce.py",
        "torch.stack([largest, -smallest], dim=1)",
        "torch.stack([largest, smallest], dim=1)",
        "scales/test_snapshot.py",
    ),
    Mutation(
        "gradients are shown in the units of values",
        "scales/snapshot.py",
        "return self.log2_gamma - self.log2_loss_scale",
        "return self.log2_sigma - self.log2_loss_scale",
        "scales/test_snapshot.py",
    ),
    Mutation(
        "a thinned history drops the last step",
        "tensorboard/history.py",
        "np.linspace(number - 1, 0, most)",
        "np.linspace(max(number - 2, 0), 0, most)",
        "tensorboard/test_plugin.py -k last_step",
    ),
    Mutation(
        "an alert is told in every step that it lasts",
        "callbacks/alert_actions.py",
        "news = [alert for alert in alerts if self._key(alert) not in self._told]",
        "news = alerts",
        "callbacks/test_alert_actions.py",
    ),
    Mutation(
        "a sample on CUDA is read while its step is under way",
        "callbacks/scale_monitor.py",
        'is_distributed() or loop.device.type != "cuda"',
        "True",
        "callbacks/test_no_waiting.py",
    ),
    Mutation(
        "of what becomes zero alike, the larger tensor is named",
        "scales/snapshot_rows.py",
        "sizes = log2_rms if is_large else -log2_rms",
        "sizes = log2_rms",
        "scales/test_snapshot_rows.py",
    ),
    Mutation(
        "loggers are told of tensors that no matmul reads",
        "scales/violations.py",
        "if read.any():",
        "if False:",
        "scales/test_snapshot_rows.py",
    ),
    Mutation(
        "what an autograd function reads counts as not read",
        "monitor/input_gradients.py",
        "if any(function_call(frame) is not None for frame in frames()):",
        "if False:",
        "monitor/test_tracked_kinds.py -k partly_known",
    ),
    Mutation(
        "a gradient is sent through one result and again through another",
        "monitor/input_gradients.py",
        "if not made.isdisjoint(autograd_operations(sources, begin)):",
        "if False:",
        "monitor/test_tracked_kinds.py -k partly_known",
    ),
    Mutation(
        "to follow an input's gradient draws random numbers",
        "monitor/input_gradients.py",
        "with torch.random.fork_rng(devices):",
        "if True:",
        "monitor/test_tracked_kinds.py -k writes_and_dropout",
    ),
    Mutation(
        "gradients of several backward passes are those of the first",
        "monitor/tracked_call.py",
        "row.backward = [self.of(gradient, 0)]",
        "row.backward = row.backward or [self.of(gradient, 0)]",
        "monitor/test_track_scales.py -k of_last_call",
    ),
    Mutation(
        "a variable is not found where Python has called a function of its own",
        "monitor/tracked_call.py",
        "found.update(dict.fromkeys(range(one.offset, after.offset, 2), entry))",
        "found[one.offset] = entry",
        "monitor/test_track_scales.py -k in_every_call",
    ),
    Mutation(
        "a copy's parameters have no hooks",
        "capture/module_steps.py",
        "memo[id(parameter)].register_hook(copied)",
        "pass",
        "monitor/test_tracked_kinds.py -k hooked",
    ),
    Mutation(
        "what a session computes for itself is shown as the step's",
        "matmuls/scaled_methods.py",
        "        with plain_functions():  # this is not part of the step\n",
        "        if True:\n",
        "monitor/test_track_scales_effects.py -k still_being_measured",
    ),
    Mutation(
        "an operand that autocast has cast is not found",
        "monitor/rows.py",
        "argument = self._by_graph(operand)",
        "pass",
        "callbacks/test_agreement.py",
    ),
    Mutation(
        "a layer in FP8 does not show its matmul",
        "matmuls/fp8_linear.py",
        "    show(site, _MM, operands, first_node, session.spacing)\n",
        "",
        "callbacks/test_agreement.py",
    ),
    Mutation(
        "stored gradients are shown without the loss scale",
        "scales/snapshot.py",
        "return self.log2_gamma - self.log2_loss_scale",
        "return self.log2_gamma",
        "callbacks/test_agreement.py",
    ),
    Mutation(
        "a tensor is judged in a unit that was not measured",
        "scales/violations.py",
        "return judged & ~lacking[:, DIRECTIONS.index(direction)]",
        "return judged",
        "callbacks/test_alert_actions.py",
    ),
    Mutation(
        "the step after the first is not sampled",
        "callbacks/monitored_steps.py",
        "in (0, 1)",
        "in (0,)",
        "callbacks/test_sampling.py",
    ),
    Mutation(
        "a sample of the last step of an epoch comes after who monitors it",
        "callbacks/scale_monitor.py",
        "        self._judge_sent()\n\n    @override\n    def on_train_end",
        "        pass\n\n    @override\n    def on_train_end",
        "callbacks/test_no_waiting.py",
    ),
    Mutation(
        "loggers are told the scales of true values",
        "scales/snapshot_rows.py",
        "log2_rms = snapshot.log2_rms(direction, stored=True)",
        "log2_rms = snapshot.log2_rms(direction)",
        "scales/test_snapshot_rows.py",
    ),
    Mutation(
        "a trend is seen where values jump",
        "scales/trends.py",
        "rising &= np.diff(values, axis=0).max(axis=0) < _LARGEST_JUMP * rise",
        "pass",
        "scales/test_trends.py",
    ),
    Mutation(
        "a launch for the copy of a tensor is repeated for the tensor itself",
        "scales/triton_statistics.py",
        "if plan.is_copied or current_device()",
        "if current_device()",
        "scales/test_launches.py",
    ),
    Mutation(
        "the launch that makes rows is repeated with numbers of another kernel",
        "scales/triton_statistics.py",
        "key = self._device.index, *numbers",
        "key = (self._device.index,)",
        "scales/test_launches.py",
    ),
    Mutation(
        "a trend goes on over new units",
        "scales/trends.py",
        "np.concatenate(judged) & (units == units[-1]).all(axis=0)",
        "np.concatenate(judged)",
        "scales/test_trends.py",
    ),
    Mutation(
        "what goes from between two stand-ins is called by the upper one, and put back by it",
        "patching.py",
        "                above._below = self._below",
        "                pass",
        "test_patching.py",
    ),
    Mutation(
        "what someone else has put over ours is taken away with ours",
        "patching.py",
        "            elif vars(self._owner).get(self._name, _MISSING) is self._value:",
        "            else:",
        "test_patching.py",
    ),
    Mutation(
        "a stand-in that was removed goes on where something still holds it",
        "patching.py",
        "        return (self._method if self.is_removed else self.call)(*args, **kwargs)",
        "        return self.call(*args, **kwargs)",
        "test_patching.py",
    ),
    Mutation(
        "a callback stays where another one raises when it is told of an error",
        "callbacks/lightning_steps.py",
        "leaving_after(earlier, owner.end, always=False)",
        "leaving_after((), owner.end, always=False)",
        "callbacks/test_after_errors.py",
    ),
    Mutation(
        "a callback stays where a search for a rate fails",
        "callbacks/lightning_steps.py",
        "leaving_after([trainer.strategy], owner.end, always=True)",
        "leaving_after((), owner.end, always=True)",
        "callbacks/test_after_errors.py",
    ),
    Mutation(
        "parameters keep the marks of a capture",
        "capture/dynamo_capture.py",
        "            del vars(tensor)[_STATIC]",
        "            pass",
        "callbacks/test_after_errors.py",
    ),
    Mutation(
        "an exception in Hugging Face's Trainer leaves the model attached",
        "loops/hugging_face.py",
        "                self.attachment.__exit__(type(error), error, error.__traceback__)\n",
        "",
        "loops/test_leaving.py",
    ),
    Mutation(
        "a copy of an attached module runs the original",
        "patching.py",
        'return own if getattr(caller, "_is_replica", False) else self._for(own)',
        "return self",
        "loops/test_called_loop.py",
    ),
    Mutation(
        "a model that is trained in evaluation mode is never trained",
        "loops/called_loop.py",
        "self._trains_in_evaluation = self._optimizers.end_with(optimizer)",
        "pass",
        "loops/test_called_loop.py",
    ),
    Mutation(
        "weights by rules are saved without a word of it",
        "callbacks/checkpoints.py",
        "        mark_saved(checkpoint)\n",
        "",
        "callbacks/test_checkpoints.py",
    ),
    Mutation(
        "weights by rules are saved after the run without a word of it",
        "callbacks/checkpoints.py",
        "    save(checkpoint)\n    mark(checkpoint, method)\n",
        "    save(checkpoint)\n",
        "callbacks/test_checkpoints.py",
    ),
    Mutation(
        "settings that contradict each other go together",
        "loops/loop.py",
        "if len(made) == 1 or (len(values) == 1 and None not in values):",
        "if made:",
        "callbacks/test_combinations.py",
    ),
    Mutation(
        "equal settings that may be given twice are refused",
        "loops/loop.py",
        " or (len(values) == 1 and None not in values)",
        "",
        "callbacks/test_combinations.py -k together",
    ),
    Mutation(
        "a hook of the class runs as one of an instance",
        "callbacks/lightning_steps.py",
        "if args and isinstance(args[0], kind):",
        "if True:",
        "callbacks/test_combinations.py -k class",
    ),
    Mutation(
        "Lightning's error of two keys comes first",
        "callbacks/lightning_steps.py",
        "any(item is self for item in value)",
        "False",
        "callbacks/test_combinations.py -k duplicate_state",
    ),
    Mutation(
        "a folder that nothing can be written to is taken",
        "loops/attach.py",
        'checked_folder("log_dir", log_dir)',
        "pass",
        "loops/test_attach.py -k bad_input",
    ),
    Mutation(
        "a module of Dynamo's that was captured often is not captured again",
        "memory/remat_module.py",
        "    forget_captures(step)\n",
        "",
        "memory/test_planner.py -k repeatedly",
    ),
    Mutation(
        "a marked method has no units",
        "loops/attach.py",
        "            callback.start(self)\n        self._forward",
        "            pass\n        self._forward",
        "loops/test_fabric.py",
    ),
    Mutation(
        "wrong words end a command with another exit status",
        "cli/commands.py",
        "EXIT_ERROR = 2",
        "EXIT_ERROR = 1",
        "test_cli.py -k usage_errors",
    ),
    # Number formats.
    Mutation(
        "rounding goes toward zero",
        "formats/round_numbers.py",
        "multiples.round_() if key is None",
        "multiples.trunc_() if key is None",
        "test_quantize.py",
    ),
    Mutation(
        "E4M3 without infinities has one number too many",
        "formats/__init__.py",
        "lost = 2 if",
        "lost = 1 if",
        "test_formats.py",
    ),
    Mutation(
        "the scale of FP8 operands is not divided out",
        "functional/low_precision.py",
        "    scale = 1.0 / (first * second)\n",
        "    scale = 1.0 / (first * 1.0)\n",
        "functional/test_low_precision.py",
    ),
    # Rules.
    Mutation(
        "factors are one over the mean square",
        "functional/rules.py",
        "mean_square**-0.5 if",
        "mean_square**-1.0 if",
        "functional/test_rules.py",
    ),
    Mutation(
        "a matmul is scaled by its rows, not by its inner dimension",
        "functional/matmul.py",
        """        inner = shape_of(a)[-1]
        space = inner""",
        """        inner = shape_of(a)[0]
        space = inner""",
        "functional/test_rules.py",
    ),
    Mutation(
        "the weight of a residual branch is not delayed: it reaches into the branch",
        "functional/arithmetic.py",
        "return scale_bwd(input, branch_weight), scale_bwd(input, skip_weight)",
        "return scale_fwd(input, branch_weight), scale_bwd(input, skip_weight)",
        "functional/test_residual.py",
    ),
    Mutation(
        "all residual branches weigh the same",
        "rules/residuals.py",
        "before[residual.stream] += own**2  # type: ignore[assignment]",
        "pass",
        "rules/test_residuals.py",
    ),
    Mutation(
        "weights learn at 1 / width",
        "rules/learning_rates.py",
        "float(_positive(info, _SIZES[info.role]) ** -0.5)",
        "float(_positive(info, _SIZES[info.role]) ** -1.0)",
        "rules/test_learning_rates.py",
    ),
    Mutation(
        "the factor of a learning rate is dropped",
        "rules/scaled_step.py",
        'settings["lr"] = group["lr"] * factors.lr',
        'settings["lr"] = group["lr"]',
        "rules/test_scaled_step.py",
    ),
    Mutation(
        "a decay that is independent of the rate follows its schedule",
        "rules/scaled_step.py",
        "                decay /= peak\n",
        "                pass\n",
        "rules/test_scaled_step_training.py -k independent_decay",
    ),
    Mutation(
        "initial scales are those of a rank's own shard",
        "rules/unit_weights.py",
        "return parameter if gather is None else gather()",
        "return parameter if gather is None else parameter.to_local()",
        "distributed/test_rules_sharded.py",
    ),
    Mutation(
        "initial scales are those of this rank's part of a weight",
        "rules/unit_weights.py",
        "        value = whole(value)\n",
        "",
        "distributed/test_rules_sharded.py",
    ),
    Mutation(
        "a rank raises its error alone",
        "loops/ranks.py",
        "gathered(problem, group)",
        "[problem]",
        "distributed/test_agreement.py",
    ),
    Mutation(
        "ranks that share a tensor count as copies of the model",
        "callbacks/distributed.py",
        "return trainer.world_size // tensor_parallel_size(trainer)",
        "return trainer.world_size",
        "distributed/test_rules_sharded.py",
    ),
    Mutation(
        "what is measured of a part is measured on ranks with other batches too",
        "callbacks/distributed.py",
        "combined_rms(gathered(rms, group))",
        "combined_rms(gathered(rms))",
        "distributed/test_rules_sharded.py",
    ),
    Mutation(
        "late gradients of parameters get no factors by rules",
        "rules/unit_weights.py",
        "is_plain = grad.is_floating_point()",
        "is_plain = False",
        "callbacks/test_late_rules.py -k factors_of_late",
    ),
    Mutation(
        "rounding errors are brought to RMS 1 when they are late",
        "rules/unit_weights.py",
        "torch.where(rms < _ROUNDING * largest, largest, rms)",
        "rms",
        "callbacks/test_late_rules.py -k rounding_errors",
    ),
    Mutation(
        "late gradients wait for a training loop that is not there",
        "rules/unit_weights.py",
        "                after_backward(self._scale_arrived)\n",
        "",
        "rules/test_late_units.py -k first_values",
    ),
    Mutation(
        "looks are read while their step runs",
        "callbacks/matmul_units.py",
        "not is_late or self._changes_numbers",
        "True",
        "callbacks/test_no_waiting.py",
    ),
    Mutation(
        "one term of a sum is taken for the whole of it",
        "capture/graph_recorder.py",
        "tensor = tensor.full_tensor()",
        "tensor = tensor",
        "distributed/test_loops.py",
    ),
    Mutation(
        "a view of a sharded parameter is read when it is free",
        "capture/fsdp_modules.py",
        "origin = node.meta.get(INPUT) or roots[node].meta.get(INPUT)",
        "origin = node.meta.get(INPUT)",
        "distributed/test_rules_sharded.py",
    ),
    # Rematerialization and the profiler.
    Mutation(
        "a plan may be over its budget",
        "memory/planner.py",
        "fitting = (plan for plan in plans if plan.peak_bytes <= limit)",
        "fitting = plans",
        "memory/test_planner.py",
    ),
    Mutation(
        "a plan for one budget may be faster than those for larger budgets",
        "memory/planner.py",
        "if plan.peak_bytes >= low and plan.seconds >= seconds]",
        "if plan.peak_bytes >= 0]",
        "memory/test_budgets.py -k random",
    ),
    Mutation(
        "the step of the optimizer has no peak",
        "memory/remat_plan.py",
        "return max(self.timeline.peak_bytes, self.least_bytes)",
        "return self.timeline.peak_bytes",
        "callbacks/test_remat_peaks.py -k AdamW",
    ),
    Mutation(
        "a variant of a graph with probes is reported as a graph of its own",
        "memory/remat_module.py",
        "        if not self._is_first:\n            return\n",
        "",
        "callbacks/test_remat_peaks.py -k monitor",
    ),
    Mutation(
        "operations in place are planned as views",
        "memory/traced_planner.py",
        "if writes[index] and node.base != index and base.region is not NodeRegion.INPUT:",
        "if False:",
        "memory/test_traced_planner.py -k batch_norm",
    ),
    Mutation(
        "the simulated step frees storages before their last reader has run",
        "memory/schedule.py",
        "np.add.at(changes, last + 1, -allocated)",
        "np.add.at(changes, last, -allocated)",
        "memory/test_planner.py memory/test_partitioner.py",
    ),
    Mutation(
        "what a graph of many keeps counts in no other graph's passes",
        "memory/measured_budget.py",
        "waiting[graph] += 1",
        "waiting[graph] += 0",
        "memory/test_measured_budget.py",
    ),
    Mutation(
        "the cut does not ask how large a value is",
        "memory/min_cut.py",
        "seconds_per_byte * self._bytes[kept], others]",
        "seconds_per_byte * np.sign(self._bytes[kept]), others]",
        "memory/test_min_cut.py",
    ),
    Mutation(
        "dropout that runs again draws anew",
        "memory/partitioner.py",
        "replays = True\n",
        "pass\n",
        "memory/test_partitioner.py",
    ),
    Mutation(
        "dropout draws as if its input were contiguous",
        "capture/aot_backend.py",
        'if input.device.type == "cpu" and not input.is_contiguous():',
        "if False:",
        "memory/test_random_bits.py -k test_dropout",
    ),
    Mutation(
        "Inductor draws numbers of its own",
        "capture/executors.py",
        '"fallback_random": True}',
        '"fallback_random": False}',
        "memory/test_random_bits.py -k inductor",
    ),
    Mutation(
        "what the first call has removed still breaks the graph",
        "capture/module_state.py",
        "self.is_due = True",
        "self.is_due = False",
        "capture/test_second_capture.py",
    ),
    Mutation(
        "views that are saved count as storages",
        "memory/problem.py",
        "kept[self.base[saved]] = True",
        "kept[saved] = True",
        "memory/test_planner.py -k saved_view",
    ),
    Mutation(
        "a GPU's attention is chosen before autocast has cast",
        "memory/gpu_attention.py",
        'if torch.is_autocast_enabled("cpu"):  # the simulated one; see ``simulating``',
        "if False:",
        "memory/test_gpu_attention.py -k autocast",
    ),
    Mutation(
        "both threads of a step share one workspace of cuBLAS",
        "memory/reserved.py",
        'thread: Thread = "backward" if in_backward else "main"',
        'thread: Thread = "main"',
        "memory/test_library_workspaces.py",
    ),
    Mutation(
        "blocks of the caching allocator count as what was asked for",
        "memory/graph_profile.py",
        "timeline, peak = memory_timeline(record, blocks)",
        "timeline, peak = memory_timeline(record)",
        "memory/test_reserved.py",
    ),
    Mutation(
        "a kernel's own memory is left out of the peak",
        "memory/step_record.py",
        "workspaces = tuple(call.costs.workspace_bytes for call in record.operators)",
        "workspaces = (0,) * len(record.operators)",
        "memory/test_step_record.py",
    ),
    # Pipelines.
    Mutation(
        "a stage receives its tensors in another order than they are sent",
        "pipeline/dataflow.py",
        "received=[node for node, first, last in spans if",
        "received=[node for node, first, last in reversed(spans) if",
        "pipeline/test_pipe.py",
    ),
    Mutation(
        "gradients of a parameter that several ranks have are not added",
        "pipeline/stage_owners.py",
        "                    total += part\n",
        "                    pass\n",
        "pipeline/test_engine.py",
    ),
    Mutation(
        "stages of 1F1B begin with as many passes as there are stages before them",
        "pipeline/schedules.py",
        "ahead = min(num_microbatches, num_stages - stage)",
        "ahead = min(num_microbatches, stage + 1)",
        "pipeline/test_search.py pipeline/test_schedules.py",
    ),
    Mutation(
        "a cut may lie between the first and the last write into a tensor",
        "pipeline/cuts.py",
        "changes[end + 1] -= 1",
        "changes[end] -= 1",
        "pipeline/test_cuts.py",
    ),
    Mutation(
        "the balance of stages forgets what is sent",
        "pipeline/balance.py",
        "seconds = others * slow + total + 2 * sent",
        "seconds = others * slow + total",
        "pipeline/test_search.py",
    ),
    Mutation(
        "an operation behind a cut is left to the stage before",
        "pipeline/cuts.py",
        "bisect.bisect_right(cuts, position)",
        "bisect.bisect_left(cuts, position)",
        "pipeline/test_cuts.py",
    ),
    Mutation(
        "a write into a view lets a cut lie between a tensor and its view",
        "pipeline/cuts.py",
        "yield positions[roots[target]], position",
        "yield positions[target], position",
        "pipeline/test_cuts.py",
    ),
    Mutation(
        "a cut may lie within a vmap",
        "pipeline/cuts.py",
        "                yield start, position",
        "                yield start, start",
        "pipeline/test_cuts.py",
    ),
    Mutation(
        "items of a tuple stay where they are read",
        "pipeline/cuts.py",
        "                last.append(user)\n",
        "",
        "pipeline/test_cuts.py",
    ),
    Mutation(
        "what crosses a cut costs only the stage that receives it",
        "pipeline/balance.py",
        "+ sends[:, None] + sends[None, :]",
        "+ sends[:, None]",
        "pipeline/test_search.py",
    ),
    Mutation(
        "the slowest stage counts once, however many microbatches there are",
        "pipeline/balance.py",
        "others = num_microbatches - 1",
        "others = 1",
        "pipeline/test_search.py",
    ),
    Mutation(
        "of cuts close to each other the one that sends most is kept",
        "pipeline/balance.py",
        "cut.boundary_bytes < best[group].boundary_bytes",
        "cut.boundary_bytes > best[group].boundary_bytes",
        "pipeline/test_search.py",
    ),
    Mutation(
        "every stage may lie where the first one may",
        "pipeline/balance.py",
        "np.where(allowed[stage], costs, np.inf)",
        "np.where(allowed[0], costs, np.inf)",
        "pipeline/test_search.py",
    ),
    Mutation(
        "of the stages of a rank the last one counts",
        "pipeline/balance.py",
        "loads[rank] += stage_costs",
        "loads[rank] = stage_costs",
        "pipeline/test_search.py",
    ),
    Mutation(
        "cuts between two stages of one rank move for the first of them",
        "pipeline/balance.py",
        "[free, ends[index + 1]]",
        "[free, ends[index + 1]] * (ranks[index] != ranks[index - 1])",
        "pipeline/test_search.py",
    ),
    Mutation(
        "a later graph may move parameters to other ranks",
        "pipeline/stage_owners.py",
        "not self._ranks(stages) <= self._ranks(self._stages[name])",
        "False",
        "pipeline/test_stage_owners.py",
    ),
    Mutation(
        "the owners of a parameter are those of the last graph",
        "pipeline/stage_owners.py",
        "self._stages = {**used, **self._stages}",
        "self._stages = {**self._stages, **used}",
        "pipeline/test_stage_owners.py",
    ),
    Mutation(
        "a buffer that one rank writes may be read by another",
        "pipeline/stage_owners.py",
        "moved += [name for name in all_written if len(all_readers[name]) > 1]\n",
        "",
        "pipeline/test_stage_owners.py",
    ),
    Mutation(
        "a stage of a later graph may read what only other stages have",
        "pipeline/balance.py",
        "counts[[stage not in stages for",
        "counts[[not stages for",
        "pipeline/test_stage_owners.py",
    ),
    Mutation(
        "memory that two parameters share is freed",
        "pipeline/rank_parameters.py",
        "if held[_storage(param)] == 1",
        "if held[_storage(param)]",
        "pipeline/test_rank_parameters.py",
    ),
    Mutation(
        "a mean over tokens divides by those of its microbatch",
        "pipeline/whole_batch.py",
        "    return total / count\n",
        "    return function(**kwargs)\n",
        "pipeline/test_batchwise.py::test_microbatch_loss_and_gradients_match_batch[tokens-4]",
    ),
    Mutation(
        "a mask's sum is that of its microbatch",
        "pipeline/whole_batch.py",
        "                node.replace_all_uses_with(given)",
        "                del given",
        "pipeline/test_batchwise.py::test_microbatch_loss_and_gradients_match_batch[masked-4]",
    ),
    Mutation(
        "a sum over the batch is averaged",
        "pipeline/batch_rules.py",
        "        return Mean(power + 1)",
        "        return Mean(power)",
        "pipeline/test_batchwise.py::test_microbatch_loss_and_gradients_match_batch[masked-4]",
    ),
    Mutation(
        "terms of a sum are added as they are",
        "pipeline/batch_rules.py",
        "            powers[operation.node.name, node.name] = fact.power",
        "            pass",
        "pipeline/test_batchwise.py::test_microbatch_loss_and_gradients_match_batch[mixture-4]",
    ),
    Mutation(
        "what couples the samples is averaged",
        "pipeline/whole_batch.py",
        "return next((fact.reason for fact in facts if isinstance(fact, Coupled)), None)",
        "return None",
        "pipeline/test_batchwise.py::test_loss_that_couples_samples_is_reported",
    ),
    Mutation(
        "parameters of unused outputs have gradients of zeros",
        "pipeline/called_module.py",
        "                parameter.grad = None",
        "                pass",
        "pipeline/test_called_module.py::test_training_matches_one_device[tuple]",
    ),
    Mutation(
        "the joint step forgets accumulation",
        "pipeline/called_module.py",
        " / runner.num_accumulated).backward()",
        ").backward()",
        "pipeline/test_called_module.py::test_training_matches_one_device[tokens]",
    ),
    Mutation(
        "gradients of what another rank owns are kept",
        "pipeline/rank_parameters.py",
        "            param.grad = None\n            if not",
        "            if not",
        "pipeline/test_rank_parameters.py",
    ),
    Mutation(
        "tied weights are two in a state that outlives its memory",
        "pipeline/rank_parameters.py",
        "key = (_storage(leaf), leaf.storage_offset(), leaf.shape, leaf.stride())",
        "key = id(leaf)",
        "pipeline/test_rank_parameters.py",
    ),
    Mutation(
        "values that were lost are zeros",
        "pipeline/rank_parameters.py",
        "lost.fill_(torch.nan)",
        "lost.zero_()",
        "pipeline/test_rank_parameters.py",
    ),
    Mutation(
        "hooks that read weights are not noticed",
        "pipeline/rank_parameters.py",
        "            cls.is_read = True\n",
        "            pass\n",
        "pipeline/test_validation_hooks.py -k reads_are_detected",
    ),
    Mutation(
        "weights that a step averages and something else reads get another scale each",
        "rules/roles.py",
        "        apart |= mixed\n        found |= {fqn: uses[fqn] for fqn in mixed}\n",
        "        apart |= mixed\n",
        "rules/test_averages.py -k one_scale",
    ),
    Mutation(
        "an average is one of something else that the step computes",
        "rules/patterns.py",
        "if (node.users or is_end) and all(reader in kept for reader in node.users):",
        "if node.users or is_end:",
        "rules/test_averages.py -k returned_multiple",
    ),
    Mutation(
        "a graph gets tensors of a user's class",
        "capture/aot_backend.py",
        "    if not positions:\n",
        "    if True:\n",
        "capture/test_tensor_subclasses.py -k memory_plan",
    ),
    Mutation(
        "the matmul in a bilinear layer runs outside of autocast",
        "capture/aot_backend.py",
        "if not torch.is_autocast_enabled(device):",
        "if True:",
        "memory/test_plain_bits.py -k outside_autocast",
    ),
    Mutation(
        "an attached callback meets optimizers of other models",
        "loops/called_loop.py",
        "if is_new and self._optimizers.end_with(optimizer):",
        "if is_new:",
        "callbacks/test_half_precision.py -k zero_eps_is_reported",
    ),
    Mutation(
        "views of a freed parameter are handed out",
        "pipeline/rank_parameters.py",
        "return bool(attribute) and attribute not in _VIEWS",
        "return bool(attribute)",
        "pipeline/test_rank_parameters.py",
    ),
    Mutation(
        "the norm over all ranks is the sum of their norms",
        "pipeline/rank_parameters.py",
        "total = torch.linalg.vector_norm(norms)",
        "total = norms.sum()",
        "pipeline/test_rank_parameters.py",
    ),
    Mutation(
        "under autocast a captured step's backward pass is traced within it",
        "capture/executors.py",
        '"same_as_forward" if backward_is_autocast else "off"',
        '"same_as_forward"',
        "memory/test_plain_bits.py -k Inverse",
    ),
    Mutation(
        "the parts of a first call are judged by a budget in bytes",
        "memory/remat_module.py",
        "if not (self._puts_off and num_graph_breaks() > self._breaks_before):",
        "if True:",
        "capture/test_second_capture.py",
    ),
    Mutation(
        "a step that stays in parts is not judged by its budget",
        "capture/module_state.py",
        "if not self.is_due:\n            getattr",
        "if False:\n            getattr",
        "capture/test_second_capture.py",
    ),
    Mutation(
        "weights that a hook draws differ among the ranks of a pipeline",
        "pipeline/strategy.py",
        "if not self._steps_done:",
        "if False:",
        "pipeline/test_strategy.py -k groups",
    ),
    Mutation(
        "a captured step makes tensors of NumPy's numbers",
        "capture/patches.py",
        "shadowed_here(VariableBuilder, wrap_numpy_ndarray=_as_number)",
        "contextlib.nullcontext()",
        "callbacks/test_numbers_in_steps.py",
    ),
    Mutation(
        "Dynamo computes in an array of the user's while it traces",
        "capture/patches.py",
        "shadowed_here(NumpyVariable, is_python_constant=_is_constant)",
        "contextlib.nullcontext()",
        "callbacks/test_numbers_in_steps.py -k array",
    ),
    Mutation(
        "a captured step keeps what a generator of the user's drew",
        "capture/patches.py",
        "shadowed_here(RandomVariable, is_supported_random_obj=lambda _: False)",
        "contextlib.nullcontext()",
        "callbacks/test_numbers_in_steps.py -k generator",
    ),
    Mutation(
        "a hint for a compiler breaks the graph",
        "capture/patches.py",
        "if any(function is hint for hint in _HINTS):",
        "if False:",
        "capture/test_plain_answers.py",
    ),
    Mutation(
        "Dynamo prepares the optimizers that a step reads for tracing",
        "capture/patches.py",
        "shadowed_here(OptimizerVariable, _set_capturable=nothing)",
        "contextlib.nullcontext()",
        "callbacks/test_nothing_twice.py",
    ),
    Mutation(
        "a step that asks for a package that is absent is not captured",
        "capture/patches.py",
        "shadowed_here(SkipFunctionVariable, call_function=call_or_raise)",
        "contextlib.nullcontext()",
        "capture/test_absent_packages.py",
    ),
    Mutation(
        "a failure of Dynamo's ends the run",
        "capture/dynamo_capture.py",
        "        convert = passing_over(convert)",
        "        pass",
        "callbacks/test_nothing_twice.py",
    ),
    Mutation(
        "views that are made in inference mode end the run",
        "capture/executors.py",
        "    drop_inference_mode(graph_module)\n",
        "",
        "callbacks/test_remat_steps.py",
    ),
    Mutation(
        "Dynamo takes addcdiv apart",
        "capture/patches.py",
        "if name not in _TAKEN_APART}",
        "if True}",
        "memory/test_plain_bits.py -k Updates",
    ),
)


def occurrences(root: Path, mutation: Mutation) -> int:
    """How often the text of a fault stands in its file."""
    path = root / PACKAGE / mutation.file
    return path.read_text().count(mutation.text) if path.is_file() else 0


def pytest_arguments(tests: str) -> list[str]:
    """The arguments of pytest for the tests of a fault."""
    files, _, expression = tests.partition(" -k ")
    arguments = [str(Path("tests") / name) for name in files.split()]
    return [*arguments, "-k", expression] if expression else arguments


def run_tests(root: Path, arguments: Sequence[str]) -> int:
    """The exit status of pytest, which runs in a copy of the checkout; 1 if it takes too long."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads, which wait
        child = os.fork()
    if not child:
        run_in_child(root, arguments)
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)  # and the processes that it has started
    os.waitpid(child, 0)
    return 1


def run_in_child(root: Path, arguments: Sequence[str]) -> NoReturn:
    """Run pytest with the package of the copy, which this process has not imported yet."""
    os.setsid()
    os.chdir(root)
    sys.path[:0] = [str(root)]
    os.environ["PYTHONPATH"] = str(root)
    sys.dont_write_bytecode = True
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    options = ["-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    status = 4
    try:
        status = int(pytest.main([*options, *arguments]))
    finally:
        os._exit(status)


def try_mutation(root: Path, mutation: Mutation) -> Outcome:
    """Put a fault into a copy of the checkout, run its tests, and take it out again."""
    if occurrences(root, mutation) != 1:
        return "stale"
    path = root / PACKAGE / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.text, mutation.replacement))
    try:
        status = run_tests(root, pytest_arguments(mutation.tests))
    finally:
        path.write_text(text)
    return "survived" if status == 0 else "found"


def copy_checkout(target: Path) -> None:
    """Copy the needed files, with the bytecode of all but the faulty one."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name)
        elif source.exists():
            shutil.copy2(source, target / name)
    compileall.compile_dir(target, quiet=2)


def main() -> int:
    """Try the faults, print a table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="faults with one of these in file or name")
    words = [word.lower() for word in parser.parse_args().words]
    chosen = [
        mutation
        for mutation in MUTATIONS
        if not words or any(word in f"{mutation.file} {mutation.fault}".lower() for word in words)
    ]
    for module in PRELOADED:
        importlib.import_module(module)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        root = Path(folder)
        copy_checkout(root)
        passing: dict[str, bool] = {}
        for mutation in chosen:
            if mutation.tests not in passing:
                # Tests that fail without a fault would find every one of them.
                status = run_tests(root, pytest_arguments(mutation.tests))
                passing[mutation.tests] = status == 0
            began = time.monotonic()
            outcome = try_mutation(root, mutation) if passing[mutation.tests] else "tests fail"
            outcomes.append(outcome)
            seconds = f"{time.monotonic() - began:5.1f} s"
            print(f"{outcome:12} {seconds}  {mutation.file}: {mutation.fault}", flush=True)
    print(f"{outcomes.count('found')} of {len(chosen)} faults found")
    return int(any(outcome != "found" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
