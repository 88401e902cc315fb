# SPDX-License-Identifier: Apache-2.0
"""Proof that the tests can fail: each mutant is the package with one line broken.

`make mutants` copies package and tests aside, breaks one line at a time and runs the test that is
named for it; a mutant whose test still passes is a hole in the tests, and the script fails.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutant(NamedTuple):
    module: str
    line: str
    broken: str
    test: str


FORMULA = "test_functional.py::test_matrices_follow_the_formula_for_20_steps"
RULES = "test_functional.py::test_auxiliary_rules_equal_torch_optim"
BLOCKS = "test_functional.py::test_a_leaf_with_blocks_or_stack_axes_moves_like_its_matrices_alone"
STEPS = "test_optimizer.py::test_steps_equal_the_functional_core_bit_by_bit"
MUTANTS = [
    # No bias correction; the exponent of the look-ahead; Nesterov dropped; the average turned.
    Mutant("momentum", "of_average = (b / debias(b, t + 1))", "of_average = (b / debias(b, t))", FORMULA),
    Mutant("momentum", "((1 - b) / debias(b, t))", "(1 - b)", FORMULA),
    Mutant("momentum", "moment / debias(b, t).to(moment.dtype) if bias_correction", "moment if bias_correction", "test_momentum.py"),
    Mutant("momentum", "    if not nesterov:\n", "    if nesterov:\n", FORMULA),
    Mutant("momentum", "torch.lerp(grad, moment, b.to(moment.dtype))", "torch.lerp(moment, grad, b.to(moment.dtype))", FORMULA),
    Mutant("momentum", "(1 - b).to(moment.dtype))", "b.to(moment.dtype))", FORMULA),
    Mutant("momentum", "-torch.expm1(t * torch.log(b))", "(1 - b.float() ** t.float()).double()", "test_momentum.py::test_debias_is_exact_to_the_last_bits"),
    # Newton-Schulz: polynomial, normalisation, orientation, eps.
    Mutant("orthogonalize", "polynomial = symmetric.baddbmm(gram, gram, gram, beta=b, alpha=c)", "polynomial = symmetric.baddbmm(gram, gram, gram, beta=c, alpha=b)", "test_orthogonalize.py::test_follows_the_formula_for_every_coefficient_set"),
    Mutant("orthogonalize", "polynomial, x, beta=a)", "polynomial, x, beta=1.0)", "test_orthogonalize.py::test_follows_the_formula_for_every_coefficient_set"),
    Mutant("orthogonalize", "return x / torch.where(peak > 0, peak, 1)", "return x * 1", "test_orthogonalize.py::test_the_result_does_not_depend_on_the_scale"),
    Mutant("orthogonalize", "m * (safety + eps) + (m == 0)", "m * safety + eps", "test_invariances.py::test_rotations_commute"),
    Mutant("orthogonalize", "    peak = largest_entry(x)", "    peak = largest_entry(x).amax()", "test_orthogonalize.py::test_members_of_a_stack_have_scales_of_their_own"),
    Mutant("orthogonalize", "m * safety + eps,", "m * safety,", "test_orthogonalize.py::test_norms_with_an_absolute_eps_shrink_tiny_matrices"),
    Mutant("orthogonalize", "    return result.mT if tall else result", "    return result", "test_orthogonalize.py::test_follows_the_formula_for_every_coefficient_set"),
    Mutant("coefficients", "a / f, b / f**3, c / f**5", "a / f, b / f**2, c / f**4", "test_coefficients.py"),
    Mutant("coefficients", "(4.0848, -6.8946, 2.9270)", "(4.0848, -6.8964, 2.9270)", "test_coefficients.py"),
    # Scale: fan_in for fan_out, the factor of match_rms_adamw.
    Mutant("scaling", "max(1.0, fan_out / fan_in)", "max(1.0, fan_in / fan_out)", FORMULA),
    Mutant("scaling", "0.2 * math.sqrt", "0.4 * math.sqrt", "test_functional.py::test_the_default_update_has_the_rms_of_adamw"),
    # Stacks: order, orientation, blocks, the members' scales.
    Mutant("buckets", "zip(spec.pieces, stacked.split", "zip(spec.pieces[::-1], stacked.split", FORMULA),
    Mutant("buckets", "wide.mT if piece.tall else wide", "wide", FORMULA),
    Mutant("buckets", "for start in range(0, len(blocks), width)", "for start in reversed(range(0, len(blocks), width))", BLOCKS),
    Mutant("buckets", "scale, _length(piece.rows), _length(piece.columns)", "scale, _length(piece.columns), _length(piece.rows)", FORMULA),
    Mutant("buckets", "or used + size > max_bytes", "or used > max_bytes", "test_buckets.py"),
    # Rules.
    Mutant("auxiliary", "denominator = root(nu / debias(b2, t).to(nu.dtype) + rule.eps_root) + eps.to(nu.dtype)", "denominator = root(nu / debias(b2, t).to(nu.dtype) + eps.to(nu.dtype))", RULES),
    Mutant("auxiliary", "nu / debias(b2, t).to(nu.dtype)", "nu", RULES),
    Mutant("auxiliary", "eps, nesterov=True)", "eps)", "test_functional.py::test_nadamw_and_lion_follow_the_formulas"),
    Mutant("auxiliary", "slots[\"mu\"], grad, betas[1])", "slots[\"mu\"], grad, betas[0])", "test_functional.py::test_nadamw_and_lion_follow_the_formulas"),
    # The step: decay, counts, masks, purity.
    Mutant("functional", "c = (-decay * call.rate(group) ** power)", "c = (-decay)", FORMULA),
    Mutant("functional", "new[\"missed\"][path] = state[\"missed\"][path] + 1", "pass", "test_functional.py::test_a_leaf_skipped_a_thousand_times_starts_like_a_fresh_one"),
    Mutant("call", "self.masked(new, paths, old).unbind()", "new.unbind()", "test_functional.py::test_present_false_is_none_and_true_is_plain"),
    Mutant("functional", "new.permute(order).clone(memory_format=torch.contiguous_format)", "new.permute(order).contiguous()", "test_functional.py::test_every_leaf_of_the_state_owns_its_memory"),
    Mutant("functional", "    return _owned(update, like)", "    return update", "test_functional.py::test_strides_of_params_change_nothing_and_come_back"),
    Mutant("functional", "    return _owned(update, like)", "    return update.permute(_memory_order(like)[0]).contiguous().permute(_memory_order(like)[1])", "test_views.py::test_strides_of_axes_of_length_1_stay_and_compile_once"),
    Mutant("functional", "if change.requires_grad or is_transformed():", "if change.requires_grad:", "test_functional.py::test_updates_are_applied_inside_a_transform_without_losing_its_gradient"),
    Mutant("functional", "else torch.no_grad():\n            call", "else torch.enable_grad():\n            call", "test_functional.py::test_requires_grad_of_params_is_restored_and_updates_are_detached"),
    Mutant("call", "self.step - missed + 1", "self.step - missed", FORMULA),
    Mutant("call", "return rate * self.config.rules[group.name].lr_scale", "return rate", "test_functional.py::test_a_rule_may_have_a_learning_rate_of_its_own"),
    Mutant("call", "value = value if self.decays_by_leaf else default", "pass", "test_functional.py::test_a_rule_may_have_a_weight_decay_of_its_own"),
    # Variants.
    Mutant("functional", "duals[path] + product if path in duals else product", "product", "test_functional.py::test_adaptive_multiplies_a_leaf_by_its_dual_norm"),
    Mutant("functional", "update * weight <= 0", "update * weight >= 0", "test_functional.py::test_cautious_decay_spares_what_the_update_pushes_away_from_zero"),
    Mutant("orthogonalize", "safety**row.power", "safety", "test_orthogonalize.py::test_the_safety_factor_is_that_of_the_norm"),
    # Variants: which rows, in which order, of which power; the correction of AdaMuon; what a schedule is read at.
    Mutant("balance", "reduced(_norm, x, tall)", "reduced(_norm, x, [not flag for flag in tall])", "test_variants.py::test_equilibration_follows_its_formula"),
    Mutant("balance", "_unit_columns(_unit_rows(x, tall), tall)", "_unit_rows(_unit_columns(x, tall), tall)", "test_variants.py::test_renormalization_follows_its_formula"),
    Mutant("balance", "return lambda x, tall: balance(with_unit_entries(x), tall)", "return balance", "test_variants.py::test_zeros_stay_zeros_and_sizes_do_not_matter"),
    Mutant("decay", '"cautious_squared": Decay(2,', '"cautious_squared": Decay(1,', "test_variants.py::test_decay_follows_its_formula"),
    Mutant("second_moment", "root(mean)", "root(moment)", "test_variants.py::test_adamuon_follows_its_formula"),
    Mutant("functional", "EQUILIBRATIONS[config.equilibrate](matrices, _tall(spec))", "matrices", "test_variants.py::test_equilibration_follows_its_formula"),
    # 16 bits: the draw, its part of a sharded leaf, its update; the sign of a mantissa; a changed zero.
    Mutant("rounding", "torch.floor(x / step + uniform)", "torch.floor(x / step + 0.5)", "test_rounding.py::test_the_mean_over_elements_and_updates_is_the_value"),
    Mutant("rounding", "torch.arange(start, stop,", "torch.arange(0, stop - start,", "test_rounding.py::test_noise_of_a_part_is_the_part_of_the_noise"),
    Mutant("rounding", "_mixed((count.to(torch.int32) * _signed(0x9E3779B9)) ^ key)", "_mixed((count.to(torch.int32) * 0) ^ key)", "test_rounding.py::test_noise_is_noise"),
    Mutant("rounding", "(bits + 0x8000) & ~0xFFFF", "bits & ~0xFFFF", "test_rounding.py::test_a_float32_is_its_nearest_bfloat16_and_a_mantissa"),
    Mutant("rounding", "rest.clamp(min=0), rest)", "rest, rest)", "test_rounding.py::test_a_weight_that_was_changed_moves_half_a_unit_at_most"),
    Mutant("call", "joined(weight, kept[path]) if path in kept else weight", "weight", "test_rounding.py::test_a_hundred_steps_move_bfloat16_weights_as_they_move_float32_weights"),
    Mutant("functional", "call.kept(mantissa, path, call.state[MANTISSA][path])", "mantissa", "test_rounding.py"),
    # 8 bits: the power, the blocks, what sits out.
    Mutant("lowbit", "_EXPONENT = 0.6", "_EXPONENT = 1.0", "test_lowbit.py::test_one_write_of_int8_is_off_by_one_percent_at_most"),
    Mutant("lowbit", "BLOCK = 272", "BLOCK = 256", "test_lowbit.py::test_bytes_per_parameter_of_every_length_from_256_on"),
    Mutant("lowbit", "in {*whole} - {0} and", "in whole[1:] and", "test_lowbit.py::test_where_the_blocks_are"),
    Mutant("call", "found[slot][path] = self.kept(tensor, path, self.state[slot][path])", "found[slot][path] = tensor", "test_lowbit.py::test_a_leaf_that_sits_out_keeps_its_bits"),
    Mutant("balance", "    if all(over_short):\n        return reduce(x, -2)", "    if all(over_short):\n        return reduce(x, -1)", "test_second_moment.py::test_normuon_follows_its_formula_in_stacks_of_wide_and_tall"),
    Mutant("balance", "torch.where(chosen, reduce(x, -2), reduce(x, -1))", "torch.where(chosen, reduce(x, -1), reduce(x, -2))", "test_second_moment.py::test_normuon_follows_its_formula_in_stacks_of_wide_and_tall"),
    Mutant("interop", "1 - float(group[row.sums])", "1.0", "test_interop.py::test_what_is_written_is_read_again"),
    Mutant("interop", "fresh - (step if count is None else count)", "fresh - step", "test_interop.py::test_a_leaf_that_joined_late_keeps_its_count"),
    Mutant("planning", "tuple(map(operator.index, leaf.shape))", "tuple(leaf.shape)", "test_compiled.py::test_shapes_that_dynamo_holds_to_be_symbolic_are_fixed"),
    Mutant("compilation", "call.__code__ = call.__code__.replace()", "pass", "test_compiled.py::test_twelve_optimizers_in_one_process"),
    # The shim.
    Mutant("optimizer", "group[\"lr\"] = group[\"lr\"].clone()", "pass", "test_optimizer.py::test_a_shared_tensor_lr_is_cloned_per_group"),
    Mutant("optimizer", "phantom = not self.state and self._is_phantom(params)", "phantom = False", "test_optimizer.py::test_the_phantom_step_of_distributed_checkpoints_only_creates_state"),
    Mutant("optimizer", "ordered = self._matched(state_dict, {name: c for name, c in changes.items() if c})", "ordered = state_dict", "test_optimizer.py::test_another_order_of_parameters_never_swaps_buffers"),
    Mutant("optimizer", "[missed[m.path] for m in members], 1)", "[missed[m.path] for m in members], 0)", STEPS),
    # Steps that are not finite, metrics, foreign optimizers, sharded leaves.
    Mutant("call", "return torch.where(self.present[path].to(update.device), update, -0.0)", "return torch.where(self.present[path].to(update.device), update, 0.0)", "test_nonfinite.py::test_a_step_that_is_not_finite_leaves_every_bit_as_it_was"),
    Mutant("call", "finite = own if finite is None else own & finite.to(own.device)", "finite = own", "test_nonfinite.py::test_found_inf_and_what_the_gradients_say_are_joined"),
    Mutant("call", "value = torch.where(self.present[path].to(value.device), value, old)", "pass", "test_metrics.py::test_a_leaf_that_sits_out_keeps_its_values"),
    Mutant("metrics", "/ math.sqrt(side)", "/ side", "test_metrics.py::test_each_is_what_it_says_of_the_update"),
    Mutant("foreign", "own |= share.values", "pass", "test_foreign.py::test_its_own_learning_rate_becomes_a_ratio_that_schedulers_keep"),
    Mutant("state_dicts", "return [{**group, \"param_names\": list(group[\"params\"])} for group in saved]", "return list(saved)", "test_optimizer.py::test_a_distributed_checkpoint_in_another_order_never_swaps_buffers"),
    Mutant("attention", "torch.where((largest > tau) & largest.isfinite(), largest, tau)", "torch.where(largest > tau, largest, tau)", "test_attention.py::test_a_head_whose_logit_is_not_finite_stays_and_the_others_are_clipped"),
    Mutant("attention", "\"rotary_query\": gamma}", "\"rotary_query\": gamma.sqrt()}", "test_attention.py::test_latent_attention_leaves_the_shared_rotary_key_alone"),
    Mutant("attention", "rows = rows[slice(*plan.own)]", "rows = rows[: plan.own[1] - plan.own[0]]", "distributed/test_heads.py"),
    Mutant("attention", "dtype = torch.promote_types(own.dtype, torch.float32)", "dtype = own.dtype", "test_attention.py::test_sixteen_bits_are_multiplied_in_float32_and_rounded_once"),
    Mutant("sharding", "len(major_first) if split.minor else 0", "0", "distributed/test_sharding.py"),
    Mutant("sharding", "size = -(-(stop - start) // self.mesh.shape[dim])", "size = (stop - start) // self.mesh.shape[dim]", "distributed/test_sharding.py"),
]  # fmt: skip


def run(folder: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", *(f"tests/{test}" for test in tests)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def survives(folder: Path, mutant: Mutant) -> str | None:
    """Why a mutant is not dead, or None."""
    source = ROOT / "fmuon" / f"{mutant.module}.py"
    text = source.read_text()
    if text.count(mutant.line) != 1:
        return f"its line stands {text.count(mutant.line)} times in {source.name}"
    target = folder / "fmuon" / source.name
    target.write_text(text.replace(mutant.line, mutant.broken))
    try:
        # 1 is pytest's code for failed tests; anything else didn't get as far.
        code = run(folder, mutant.test).returncode
    finally:
        target.write_text(text)
    return None if code == 1 else f"pytest ended with {code}"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("fmuon", "tests"):
            shutil.copytree(
                ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(ROOT / "pyproject.toml", folder)
        whole = run(folder, *dict.fromkeys(mutant.test for mutant in MUTANTS))
        if whole.returncode:
            sys.exit(
                f"the tests fail without any mutant:\n{whole.stdout[-2000:]}{whole.stderr[-2000:]}"
            )
        alive = 0
        for mutant in MUTANTS:
            reason = survives(folder, mutant)
            alive += reason is not None
            print(
                f"{'ALIVE' if reason else 'dead '} {mutant.module}: {mutant.line.strip()}",
                flush=True,
            )
            if reason:
                print(f"      {reason}; {mutant.test}")
    print(f"{len(MUTANTS) - alive} of {len(MUTANTS)} mutants are dead")
    sys.exit(alive > 0)


if __name__ == "__main__":
    main()
