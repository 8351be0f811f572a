"""A step of any elementwise optimizer on fp32 stand-ins for parameters that are stored in less.

For each batch of pieces (`pieces.py`), a bounded number of elements:

    1  widen     w = fp32(p), + fp32(compensation) under a rule that has one; gradients and moments in fp32
    2  step      the user's optimizer, on w: it decays w, and moves it, in fp32
    3  narrow    p = rounded(w), compensation = w − p, moments rounded to the format that they are kept in

so that an update and the weight decay are rounded once, together. fp32 parameters are their own stand-ins. Where
nothing is narrower than fp32, a step is `optimizer.step()`.

While the optimizer steps, its `param_groups` hold the stand-ins and its `state` their states; both are put back
whatever happens. Hooks of the optimizer's step run once a batch. A group's own numbers (a counter that some optimizers
keep there) start each batch as they started the step.

Random bits depend on the seed, the number of the step, and the position in the batch: see `draws.py`.

Source: torchao, `optim/` (stochastic rounding inside its own optimizers); here it is outside of anybody's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bitwright import formats
from bitwright.errors import TrainingError
from bitwright.training.gradients import raise_if_scaled_elsewhere
from bitwright.training.optimizer.draws import Draws
from bitwright.training.optimizer.elementwise import why_not_elementwise
from bitwright.training.optimizer.moment_store import COMPENSATION, MomentStore, load_exactly, promote_counters
from bitwright.training.optimizer.moments import MOMENT_DTYPES, round_values
from bitwright.training.optimizer.pieces import BATCH_ELEMENTS, Piece, cut
from bitwright.training.optimizer.remainder import take_up
from bitwright.training.optimizer.swallowed import Swallowed
from bitwright.training.optimizer.swallowed_steps import BatchBefore, count_decay
from bitwright.training.optimizer.update import UPDATES, UpdateRule
from bitwright.training.policy import Policy

_FORMATS: Mapping[torch.dtype, str] = {dtype: name for name, dtype in MOMENT_DTYPES.items()}


def why_not_update(
    optimizer: Any, rule: UpdateRule, moments: str = "fp32", *, cast_to: str | None = None
) -> str | None:
    """Return why an optimizer cannot be stepped under a rule, or None if it can.

    Args:
        optimizer: its trained parameters decide: fp32 ones with fp32 moments are stepped by any optimizer. Frozen
            ones have no gradient, so that nothing of them is ever stored.
        rule: how parameters are stored.
        moments: format that moments are kept in.
        cast_to: format that some parameters are still to be cast to.
    """
    found = {p.dtype for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    found |= set() if cast_to is None else {MOMENT_DTYPES[cast_to]}
    is_wide = found <= {torch.float32, torch.float64} and moments == "fp32"
    for dtype in sorted(found, key=str):
        if _FORMATS.get(dtype) not in rule.parameters and not is_wide:
            return (
                f"update rule '{rule.name}' stores {' and '.join(rule.parameters)} parameters, and the optimizer holds "
                f"{dtype} ones; load the model with dtype=torch.float32, or make the optimizer once the model is cast"
            )
    eps = _vanished_eps(optimizer)
    if eps is not None:
        return eps
    if is_wide:
        return None
    reason = why_not_elementwise(optimizer)
    if reason is None:
        return None
    return (
        f"{type(optimizer).__name__} does not treat every number by itself: {reason}; parameters or moments in less "
        "than fp32 need an optimizer that does (AdamW, SGD …): use one, or a policy with fp32 parameters and moments"
    )


def _vanished_eps(optimizer: Any) -> str | None:
    for group in optimizer.param_groups:
        given = group.get("eps")
        for eps in given if isinstance(given, tuple) else (given,):
            if isinstance(eps, float) and eps > 0 and float(formats.round("fp32", eps)) == 0:
                return f"eps={eps:g} is 0 in fp32, which updates are computed in; give at least 1e-45, or better 1e-8"
        for name, value in group.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.element_size() < 4:
                return f"{name} is a tensor of {value.dtype}, which rounds it; give a number or an fp32 tensor"
    return None


def make_update(optimizer: Any, policy: Policy, *, seed: int = 0, counts: bool = False) -> Update:
    """Return what steps an optimizer under a policy. Arguments and errors as of `Update`."""
    return Update(optimizer, UPDATES[policy.update], moments=policy.moments, seed=seed, counts=counts)


class Update:
    """Steps an optimizer whose parameters or moments may be narrower than fp32.

    Args:
        optimizer: stepped from now on through `step` alone.
        rule: how parameters are stored, one of `UPDATES`.
        moments: format that moments are kept in between steps: fp32, bf16 or fp16.
        seed: of the random bits, in [0, 2^64); the same on ranks that hold the same parameters.
        counts: count updates that rounding swallows (`swallowed`); costs another read of everything.
        batch_elements: see `pieces.py`; part of what decides the random bits.

    Raises:
        TrainingError: the optimizer cannot be stepped so; the reason and what to do are said. Nothing has changed then.
    """

    def __init__(
        self,
        optimizer: Any,
        rule: UpdateRule,
        *,
        moments: str = "fp32",
        seed: int = 0,
        counts: bool = False,
        batch_elements: int = BATCH_ELEMENTS,
    ) -> None:
        if moments not in MOMENT_DTYPES:
            raise TrainingError(f"moments are kept in {', '.join(MOMENT_DTYPES)}, not in {moments!r}")
        raise_if_scaled_elsewhere(optimizer)
        reason = why_not_update(optimizer, rule, moments)
        if reason is not None:
            raise TrainingError(reason)
        self.optimizer = optimizer
        self.rule = rule
        self.moments = moments
        self._batch_elements = batch_elements
        self._draws = Draws(seed)
        self._store = MomentStore(optimizer, moments, rule.moment_rounding, self._draws)
        self._counts: dict[str, Swallowed] | None = {} if counts else None
        self._undo: Callable[[], None] | None = None if self.is_plain else load_exactly(optimizer)
        take_up(optimizer, is_compensated=rule.is_compensated)

    @property
    def is_plain(self) -> bool:
        """Whether a step is `optimizer.step()` and nothing else."""
        held = (p for group in self.optimizer.param_groups for p in group["params"])
        # one that was frozen since the backward pass still has its gradient, and is updated from it
        sizes = {p.element_size() for p in held if p.requires_grad or p.grad is not None}
        return min(sizes, default=4) >= 4 and self.moments == "fp32"

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters from their gradients, which must be unscaled and finite."""
        if self.is_plain:
            self._step_plain()
        else:
            groups = self.optimizer.param_groups
            numbers = [{key: value for key, value in group.items() if key != "params"} for group in groups]
            for index, batch in enumerate(cut(groups, self._batch_elements)):
                if index:
                    for group, before in zip(groups, numbers, strict=True):
                        group.update(before)
                self._step_batch(batch, index)
        self._draws.advance()

    @property
    def swallowed(self) -> dict[str, Swallowed]:
        """Since the beginning, empty unless `counts` was asked for.

            weights    what was stored as it had been; of fp32 parameters, a number is due if it has a gradient
            decay      what the decay would lose as a step by itself, rounded to nearest, under every rule
            exp_avg …  each moment that is narrower than fp32, by its key

        Under stochastic rounding what stays this time moves another time: such a share is not lost.
        """
        return dict(self._counts or {})

    def state_dict(self) -> dict[str, Any]:
        """What the optimizer's own state_dict does not hold: seed and step of the random bits."""
        return {"rule": self.rule.name, "moments": self.moments, "draws": self._draws.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a `state_dict` left off; the optimizer's state is loaded by itself.

        Raises:
            TrainingError: it is the state of another rule, or moments were kept in another format.
        """
        for name, here in (("rule", self.rule.name), ("moments", self.moments)):
            if state.get(name) != here:
                raise TrainingError(
                    f"the checkpoint's {name} is {state.get(name)!r}, and this run's {here!r}; resume with the policy "
                    "that it was saved under"
                )
        self._draws.load_state_dict(state["draws"])

    def close(self) -> None:
        """Leave the optimizer as any other: its next load_state_dict casts again."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _step_plain(self) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        before = [p.detach().clone() for p in parameters] if self._counts is not None else []
        decay = count_decay(self.optimizer.param_groups) if self._counts is not None else Swallowed()
        num_states = len(self.optimizer.state)
        self.optimizer.step()
        if len(self.optimizer.state) != num_states:
            promote_counters(self.optimizer.state)
        if self._counts is not None:
            self._add("decay", decay)
            for parameter, old in zip(parameters, before, strict=True):
                due = parameter.grad != 0
                self._add("weights", Swallowed(due=int(due.sum()), lost=int((due & (parameter == old)).sum())))

    def _step_batch(self, batch: list[Piece], index: int) -> None:
        narrow = [piece for piece in batch if piece.is_narrow]
        total = sum(piece.num_elements for piece in narrow)
        flat = torch.empty(total, dtype=torch.float32, device=narrow[0].flat.device if narrow else "cpu")
        wide = dict(zip(map(id, narrow), flat.split([piece.num_elements for piece in narrow]), strict=True))
        for piece in narrow:
            wide[id(piece)].copy_(piece.stored)
            if self.rule.is_compensated and COMPENSATION in self.optimizer.state.get(piece.parameter, {}):
                wide[id(piece)].add_(piece.part_of(self.optimizer.state[piece.parameter][COMPENSATION]))
        stand_ins = []
        for piece in batch:
            stand_in = piece.shaped(wide.get(id(piece), piece.stored))
            stand_in.grad = piece.gradient()
            stand_ins.append(stand_in)
        counted = None if self._counts is None else BatchBefore(batch, stand_ins, self.optimizer)
        states = [self._store.take(piece) for piece in batch]
        with self._swapped(batch, stand_ins, states) as after:
            self.optimizer.step()
        for piece, stand_in in zip(batch, stand_ins, strict=True):
            if id(piece) in wide and stand_in.data_ptr() != wide[id(piece)].data_ptr():
                wide[id(piece)].copy_(stand_in.reshape(-1))  # an optimizer that puts in a tensor of its own
        exact = flat.clone() if counted is not None else flat
        self._narrow(narrow, flat, index)
        for piece in batch:
            piece.write_back()
        self._store.put_back([(p, after[s]) for p, s in zip(batch, stand_ins, strict=True)], index, self._counts)
        if counted is not None:
            lengths = [piece.num_elements for piece in narrow]
            self._add("weights", counted.weights(dict(zip(map(id, narrow), exact.split(lengths), strict=True))))
            self._add("decay", counted.decay)

    def _narrow(self, narrow: list[Piece], flat: Tensor, batch: int) -> None:
        """Store the stand-ins, all of one format, and what rounding took away."""
        if not narrow:
            return
        format = _FORMATS[narrow[0].flat.dtype]
        residual = flat.clone() if self.rule.is_compensated else None
        round_values(flat, format, self.rule.rounding, self._draws.seed_of("parameter", batch))
        if residual is not None:
            residual.sub_(flat)
        first = 0
        for piece in narrow:
            run = slice(first, first + piece.num_elements)
            piece.stored.copy_(flat[run])
            if residual is not None:
                kept = self.optimizer.state[piece.parameter]
                if COMPENSATION not in kept:
                    kept[COMPENSATION] = torch.zeros(piece.shape, dtype=piece.flat.dtype, device=piece.flat.device)
                piece.part_of(kept[COMPENSATION]).copy_(residual[run])
            first = run.stop

    @contextmanager
    def _swapped(self, batch: list[Piece], stand_ins: list[Tensor], states: list[dict[str, Any]]) -> Any:
        """Let the optimizer hold stand-ins and their states; yields the states, by stand-in."""
        optimizer = self.optimizer
        groups, state = optimizer.param_groups, optimizer.state
        members = [group["params"] for group in groups]
        swapped: defaultdict[Any, Any] = defaultdict(dict)
        swapped.update({key: value for key, value in state.items() if not isinstance(key, Tensor)})
        swapped.update({stand_in: own for stand_in, own in zip(stand_ins, states, strict=True) if own})
        for group in groups:
            group["params"] = []
        for piece, stand_in in zip(batch, stand_ins, strict=True):
            groups[piece.group]["params"].append(stand_in)
        optimizer.param_groups = [group for group in groups if group["params"]]
        optimizer.state = swapped
        try:
            yield swapped
        finally:
            for group, own in zip(groups, members, strict=True):
                group["params"] = own
            optimizer.param_groups, optimizer.state = groups, state
        state.update({key: value for key, value in swapped.items() if not isinstance(key, Tensor)})

    def _add(self, name: str, found: Swallowed) -> None:
        assert self._counts is not None
        self._counts[name] = self._counts.get(name, Swallowed()) + found
