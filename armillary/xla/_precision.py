"""Mixed precision: computes the matrix products of a step in a half precision.

Matrix products and convolutions take nearly all the time of a step, and are fast in
half precision. So this pass adds casts to their operands in the traced program, and
lets them add up in float32. All other operations keep their dtypes, so parameters,
gradients, losses and the state stay in float32. The program is edited after
differentiation, so it does not matter which library has made the model.

These products keep float32, because they would lose digits and gain no time:

- inner products of vectors, such as a weighted sum of losses, and outer products, such
  as positions times frequencies;
- products with a `precision` of their own;
- products of gradients outside of the model, as in the optimizers Muon and Shampoo.
"""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from armillary._dataflow import Dataflow
from armillary._jaxpr import IDENTITIES, programs_in
from armillary._passes import is_differentiated

_DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "f16": "float16",
    "float16": "float16",
    "f32": "float32",
    "float32": "float32",
}
_PARTS = {"p": "params", "c": "compute", "o": "output"}
_WHOLE = "float32"
_DOT = "dot_general"
_RAGGED = "ragged_dot_general"
_CONVOLUTION = "conv_general_dilated"
_PRODUCTS = {_DOT, _RAGGED, _CONVOLUTION}
# Operations that do no more than run their programs. A kernel of Pallas and the solver
# of `custom_linear_solve` keep their dtypes.
_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "shard_map"),
    *("cond", "while", "scan", "custom_jvp_call", "custom_vjp_call"),
}


def parse_precision(word: Any) -> str:
    """Returns the dtype in which a step computes, such as `"bfloat16"`.

    Raises:
        TypeError: If `word` is not a string.
        ValueError: If `word` is not a precision, or asks for parameters or outputs that
            are not `float32`.
    """
    if not isinstance(word, str):
        raise TypeError(
            f"`precision` is {word!r:.60} of type {type(word).__name__}, but it must "
            'be a string. Write `precision="bf16"`.'
        )
    if word in _DTYPES:
        return _DTYPES[word]

    dtypes: dict[str, str] = {}
    for part in word.split(","):
        name, _, dtype = part.strip().partition("=")
        name = _PARTS.get(name, name)
        if name not in _PARTS.values() or dtype not in _DTYPES:
            raise ValueError(
                f'`precision` is {word!r}, but it must be "bf16", "f16" or "f32", or '
                'name all three dtypes: "params=f32,compute=bf16,output=f32". Write '
                '`precision="bf16"`.'
            )
        dtypes[name] = _DTYPES[dtype]

    fixes = {
        "params": "give the layers a `param_dtype`",
        "output": "cast the outputs in the step",
    }
    for name, fix in fixes.items():
        dtype = dtypes.get(name, _WHOLE)
        if dtype != _WHOLE:
            raise ValueError(
                f"`precision` is {word!r}, but it changes only `compute`, and so "
                f"`{name}` must be f32. For {dtype}, {fix}."
            )
    return dtypes.get("compute", _WHOLE)


class Edited(NamedTuple):
    """A program with casts, and the number of products that compute in the dtype."""

    program: core.ClosedJaxpr
    num_products: int


def compute_in(program: core.ClosedJaxpr, dtype: str, platform: str) -> Edited:
    """Returns a program whose float32 products take operands of a half precision."""
    updates = _FindUpdates()
    updates.run(program, [False] * len(program.jaxpr.invars))
    editor = _Editor(_Dtype(dtype, platform), updates.found)
    return Edited(editor.edit_closed(program), editor.num_products)


def _may_narrow(equation: Any) -> bool:
    """Returns whether a product may compute in half precision."""
    name = equation.primitive.name
    if name not in _PRODUCTS:
        return False
    left, right, *_ = (atom.aval for atom in equation.invars)
    (result,) = (variable.aval for variable in equation.outvars)
    is_whole = all(aval.dtype == _WHOLE for aval in (left, right, result))
    if not is_whole or not _is_default(equation.params["precision"]):
        return False
    if name != _DOT:
        return True

    (added_axes, _), (batch_axes, _) = equation.params["dimension_numbers"]
    num_terms = math.prod(left.shape[axis] for axis in added_axes)
    num_products = math.prod(left.shape[axis] for axis in batch_axes)
    is_outer = num_terms <= 1
    is_inner = result.size <= num_products
    return not (is_outer or is_inner)


def _is_default(precision: Any) -> bool:
    # A pair has a precision for each operand.
    parts = precision if isinstance(precision, tuple) else (precision,)
    defaults = (None, jax.lax.Precision.DEFAULT)
    return all(part in defaults for part in parts)


class _FindUpdates(Dataflow[bool]):
    """Finds products that an optimizer computes from gradients.

    A fact says whether a value depends on a gradient. JAX's name stack shows which
    operations are differentiated, and so belong to the model.
    """

    nothing = False

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def join(self, facts: Iterable[bool]) -> bool:
        return any(facts)

    def transfer(self, equation: Any, operands: list[bool]) -> list[bool] | None:
        has_programs = next(programs_in(equation), None) is not None
        if has_programs:
            return None
        depends_on_gradient = any(operands)
        if not depends_on_gradient:
            is_gradient = self.is_backward(equation)
            return [True] * len(equation.outvars) if is_gradient else None

        name = equation.primitive.name
        if name in _PRODUCTS:
            around = (equation, *self.within)
            is_in_model = any(map(is_differentiated, around))
            if not is_in_model:
                self.found.add(id(equation))
        # Each result depends on its own operand alone, and not on the others.
        is_same = name in IDENTITIES and len(operands) == len(equation.outvars)
        return operands if is_same else None


class _Dtype:
    """A dtype of half precision on one platform, and equations that cast to it.

    Attributes:
        dtype: The dtype.
        has_products: Whether products take operands of this dtype. XLA's CPU compiler
            cannot compile some ("Unsupported element type for DotThunk::Execute").
            There, products take operands that are rounded to it, for the same result.
    """

    def __init__(self, name: str, platform: str) -> None:
        self.dtype = np.dtype(name)
        self.has_products = platform != "cpu"
        self._narrow = _make_template(self._cast_down)
        self._widen = _make_template(self._cast_up, name)
        # XLA may leave out a cast and the cast back, but it keeps this operation.
        self._round = _make_template(self._round_to)

    def _cast_down(self, value: Any) -> Any:
        return jax.lax.convert_element_type(value, self.dtype)

    def _cast_up(self, value: Any) -> Any:
        return jax.lax.convert_element_type(value, _WHOLE)

    def _round_to(self, value: Any) -> Any:
        info = jnp.finfo(self.dtype)
        return jax.lax.reduce_precision(value, info.nexp, info.nmant)

    def round(self, old: Any, user: Any) -> Any:
        """Returns the equation that rounds a variable, for the product `user`."""
        rounded = _with_dtype(old, old.aval.dtype)
        return _apply(self._round, old, rounded, user)

    def narrow(self, old: Any, user: Any) -> Any:
        """Returns the equation that casts a variable to the dtype."""
        narrow = _with_dtype(old, self.dtype)
        return _apply(self._narrow, old, narrow, user)

    def widen(self, old: Any, new: Any, user: Any) -> Any:
        """Returns the equation that casts a variable of the dtype back."""
        return _apply(self._widen, old, new, user)


class _Editor:
    """Adds casts to a program and to the programs nested in it."""

    def __init__(self, dtype: _Dtype, kept: set[int]) -> None:
        self.num_products = 0
        self._dtype = dtype
        self._kept = kept
        # The programs are kept alive, so that Python does not reuse their identities.
        # JAX compiles a function once if all calls have the same program.
        self._edited: dict[int, tuple[Any, Any]] = {}

    def edit_closed(self, program: core.ClosedJaxpr) -> core.ClosedJaxpr:
        return self._once(program, self._edit_closed)

    def _once(self, program: Any, edit: Callable[[Any], Any]) -> Any:
        if id(program) not in self._edited:
            self._edited[id(program)] = program, edit(program)
        _, edited = self._edited[id(program)]
        return edited

    def _edit_closed(self, program: core.ClosedJaxpr) -> core.ClosedJaxpr:
        edited = self._once(program.jaxpr, self._edit)
        if edited is program.jaxpr:
            return program
        return core.ClosedJaxpr(edited, program.consts)

    def _edit(self, jaxpr: Any) -> Any:
        equations: list[Any] = []
        casts = _Casts(self._dtype)
        for equation in jaxpr.eqns:
            is_edited = _may_narrow(equation) and id(equation) not in self._kept
            if is_edited:
                self.num_products += 1
                equations += self._edit_product(equation, casts)
                continue
            casts.note(equation)
            equations.append(self._edit_call(equation))

        is_same = all(map(_is_identical, equations, jaxpr.eqns))
        if is_same and len(equations) == len(jaxpr.eqns):
            return jaxpr
        return jaxpr.replace(eqns=casts.without_unused(equations, jaxpr.outvars))

    def _edit_product(self, equation: Any, casts: "_Casts") -> list[Any]:
        left, right, *others = equation.invars
        added, operands = casts.cast([left, right], equation)
        product = equation.replace(invars=[*operands, *others])
        if not self._dtype.has_products:
            return [*added, product]

        if equation.primitive.name != _CONVOLUTION:
            # The terms are added in float32, so the result needs no cast.
            whole_dtype = np.dtype(_WHOLE)
            params = {**equation.params, "preferred_element_type": whole_dtype}
            return [*added, product.replace(params=params)]

        # Not every platform has convolutions with results of another dtype.
        params = {**equation.params, "preferred_element_type": None}
        (whole,) = equation.outvars
        result = _with_dtype(whole, self._dtype.dtype)
        convolution = product.replace(outvars=[result], params=params)
        widening = self._dtype.widen(result, whole, equation)
        return [*added, convolution, widening]

    def _edit_call(self, equation: Any) -> Any:
        if equation.primitive.name not in _CALLS:
            return equation
        old = equation.params
        new = {name: self._edit_any(value) for name, value in old.items()}
        is_same = all(map(_is_identical, new.values(), old.values()))
        return equation if is_same else equation.replace(params=new)

    def _edit_any(self, value: Any) -> Any:
        """Edits the value of a parameter, if it has programs."""
        if isinstance(value, core.ClosedJaxpr):
            return self.edit_closed(value)
        if isinstance(value, core.Jaxpr):
            return self._once(value, self._edit)
        if not isinstance(value, tuple):
            return value
        # The branches of `cond`.
        has_programs = any(isinstance(item, core.ClosedJaxpr) for item in value)
        if not has_programs:
            return value
        edited = tuple(map(self._edit_any, value))
        is_same = all(map(_is_identical, edited, value))
        return value if is_same else edited


class _Casts:
    """The casts of one program, each made once."""

    def __init__(self, dtype: _Dtype) -> None:
        self._dtype = dtype
        self._cast: dict[Any, Any] = {}
        # The constraints that collect a divided parameter, by their results.
        self._constraints: dict[Any, Any] = {}

    def note(self, equation: Any) -> None:
        if equation.primitive.name == "sharding_constraint":
            self._constraints[equation.outvars[0]] = equation

    def cast(self, variables: list[Any], user: Any) -> tuple[list[Any], list[Any]]:
        """Returns equations that cast variables for a product, and their results."""
        added: list[Any] = []
        for variable in variables:
            if variable not in self._cast:
                made = self._make(variable, user)
                (self._cast[variable],) = made[-1].outvars
                added += made
        return added, [self._cast[variable] for variable in variables]

    def without_unused(self, equations: list[Any], outputs: list[Any]) -> list[Any]:
        """Leaves out the constraints whose results only products used."""
        used = set(map(id, outputs))
        for equation in equations:
            used.update(map(id, equation.invars))
        unused: set[int] = set()
        for result, constraint in self._constraints.items():
            if id(result) not in used:
                unused.add(id(constraint))
        return [equation for equation in equations if id(equation) not in unused]

    def _make(self, variable: Any, user: Any) -> list[Any]:
        dtype = self._dtype
        only_rounds = not dtype.has_products
        made: list[Any] = []
        constraint = self._constraints.get(variable)
        source = variable
        if constraint is not None:
            # Devices exchange half the bytes if the cast comes first.
            (source,) = constraint.invars

        if only_rounds:
            made.append(dtype.round(source, user))
            (source,) = made[-1].outvars
        made.append(dtype.narrow(source, user))
        (narrow,) = made[-1].outvars

        if constraint is not None:
            collected = _with_dtype(variable, dtype.dtype)
            made.append(constraint.replace(invars=[narrow], outvars=[collected]))
            narrow = collected
        if only_rounds:
            whole = _with_dtype(variable, variable.aval.dtype)
            made.append(dtype.widen(narrow, whole, user))
        return made


def _make_template(cast: Callable[[Any], Any], dtype: str = _WHOLE) -> Any:
    """Returns an equation for a scalar, whose variables are to be replaced."""
    scalar = jax.ShapeDtypeStruct((), dtype)
    (equation,) = jax.make_jaxpr(cast)(scalar).eqns
    return equation


def _apply(template: Any, old: Any, new: Any, user: Any) -> Any:
    return template.replace(invars=[old], outvars=[new], source_info=user.source_info)


def _with_dtype(variable: Any, dtype: Any) -> Any:
    """Returns a new variable of the same shape."""
    new = copy.copy(variable)
    new.aval = variable.aval.update(dtype=dtype, weak_type=False)
    return new


def _is_identical(new: Any, old: Any) -> bool:
    return new is old
