"""The state that a worker needs to begin where another one is, and its form on the way.

Values that are no tensors travel as JSON has them, and each comes back with its own type, or is refused by name. A
value that JSON has no notation for is an object with one key, "": what it is, and of what it is made. Nothing that is
received is ever called or imported: an instance of a class has the attributes that it had, and its class is one that
the program has loaded already.
"""

import base64
import dataclasses
import enum
import json
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gradserve.conversion.arrays import as_array
from gradserve.results import ArrayLike, DenseSpec
from gradserve_protocol.argument import Argument
from gradserve_protocol.errors import InvalidArgumentError

Json: TypeAlias = Any
Encode: TypeAlias = Callable[[Any, str], tuple[str, Json] | None]
"""Returns a kind and what JSON has for it, given a value of a type that is not known here and its name; or None."""
Decode: TypeAlias = Callable[[str, Json], Any]
"""Returns the value of such a kind."""

_TAG = ""
_SEQUENCES: dict[str, type[Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, type[Any]] = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
_KINDS = {each: kind for kinds in (_SEQUENCES, _MAPPINGS) for kind, each in kinds.items()}
_FACTORIES: dict[str, type[Any]] = {each.__name__: each for each in (list, dict, set, int, float, str, tuple)}
_MOST_DECIMAL_BITS = 10_000
"""The size of integers that Python still reads in decimal notation."""


def as_json(value: Any, name: str, encode: Encode = lambda _value, _name: None) -> Json:
    """Returns a value as JSON has it: None, numbers, texts, bytes, containers, arrays, and instances of dataclasses.

    Args:
        value: The value, of any depth.
        name: What to call it in errors.
        encode: For values of other types; without it, they are refused.

    Raises:
        InvalidArgumentError: It has something that would not come back as it is; the message names that.
    """
    try:
        return _encoded(value, name, encode)
    except RecursionError:
        raise _refused(value, name, "that contains itself, or is nested too deeply") from None


def from_json(encoded: Json, decode: Decode | None = None) -> Any:
    """Returns the value that `as_json` was given.

    Args:
        encoded: What `as_json` has returned.
        decode: For the kinds that its `encode` knows.

    Raises:
        InvalidArgumentError: It has an instance of a class that this program has not loaded, or has with other fields.
    """
    if isinstance(encoded, list):
        return [from_json(each, decode) for each in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if _TAG not in encoded:
        return {key: from_json(each, decode) for key, each in encoded.items()}
    kind, content = encoded[_TAG]
    return _decoded(kind, content, decode)


def title_of(value: Any, name: str) -> tuple[str, str]:
    """Returns the module and the name of the class of a value, by which others find it.

    Raises:
        InvalidArgumentError: They would not.
    """
    kind = type(value)
    if class_named(kind.__module__, kind.__qualname__) is not kind:
        raise _refused(value, name, "of a class that has no name in its module")
    return kind.__module__, kind.__qualname__


def class_named(module: str, title: str) -> type[Any] | None:
    """Returns a class by its module and its name in that, if this program has loaded it; runs no code for that."""
    found: Any = sys.modules.get(module)
    for part in title.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


def _encoded(value: Any, name: str, encode: Encode) -> Json:
    kind = type(value)
    if value is None or kind in (bool, float, str) or (kind is int and value.bit_length() <= _MOST_DECIMAL_BITS):
        return value
    if kind is list:
        return _items(value, name, encode)
    if kind is dict and all(type(key) is str and key != _TAG for key in value):
        return {key: _encoded(each, f"{name}[{key!r}]", encode) for key, each in value.items()}
    return {_TAG: encode(value, name) or _tagged(value, kind, name, encode)}


def _tagged(value: Any, kind: type[Any], name: str, encode: Encode) -> tuple[str, Json]:
    if kind in _SEQUENCES.values():
        return _KINDS[kind], _items(value, name, encode)
    if kind in _MAPPINGS.values():
        return _KINDS[kind], _pairs(value, name, encode)
    if kind is defaultdict:
        return "defaultdict", [_factory(value, name), _pairs(value, name, encode)]
    if kind is deque:
        return "deque", [value.maxlen, _items(value, name, encode)]
    if kind is int:
        return "int", hex(value)
    if kind is complex:
        return "complex", [value.real, value.imag]
    if kind in (bytes, bytearray):
        return kind.__name__, _text(value)
    if isinstance(value, np.generic) or kind is np.ndarray:
        return _encoded_array(value, name)
    if isinstance(value, enum.Enum) and value.name in kind.__members__:
        return "enum", [*title_of(value, name), value.name]
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return "namedtuple", [*title_of(value, name), _items(value, name, encode)]
    if dataclasses.is_dataclass(kind):
        return "dataclass", [*title_of(value, name), _fields(value, name, encode)]
    raise _refused(value, name, "of a type that is not known")


def _decoded(kind: str, content: Json, decode: Decode | None) -> Any:
    def inner(encoded: Json) -> Any:
        return from_json(encoded, decode)

    match kind:
        case "tuple" | "set" | "frozenset":
            return _SEQUENCES[kind](inner(content))
        case "dict" | "Counter" | "OrderedDict":
            return _MAPPINGS[kind](_unpaired(content, inner))
        case "defaultdict":
            return defaultdict(_FACTORIES.get(content[0]), _unpaired(content[1], inner))
        case "deque":
            return deque(inner(content[1]), content[0])
        case "int":
            return int(content, 16)
        case "complex":
            return complex(*content)
        case "bytes":
            return _bytes(content)
        case "bytearray":
            return bytearray(_bytes(content))
        case "scalar" | "array":
            dtype, shape, data = content
            array = np.frombuffer(_bytes(data), np.dtype(dtype)).reshape(shape).copy()
            return array if kind == "array" else array[()]
        case "enum":
            return _loaded(*content[:2]).__members__[content[2]]
        case "namedtuple":
            return tuple.__new__(_loaded(*content[:2]), inner(content[2]))
        case "dataclass":
            return _instance(_loaded(*content[:2]), inner(content[2]))
    if decode is None:
        raise InvalidArgumentError(f"the state of another worker has a value of a kind that is not known: {kind!r}")
    return decode(kind, content)


def _items(values: Iterable[Any], name: str, encode: Encode) -> Json:
    return [_encoded(each, f"{name}[{index}]", encode) for index, each in enumerate(values)]


def _pairs(values: dict[Any, Any], name: str, encode: Encode) -> Json:
    return [
        [_encoded(key, f"key {key!r} of {name}", encode), _encoded(each, f"{name}[{key!r}]", encode)]
        for key, each in values.items()
    ]


def _unpaired(pairs: Json, inner: Callable[[Json], Any]) -> dict[Any, Any]:
    return {inner(key): inner(value) for key, value in pairs}


def _factory(value: "defaultdict[Any, Any]", name: str) -> str | None:
    factory = value.default_factory
    if factory is None:
        return None
    found = next((title for title, each in _FACTORIES.items() if each is factory), None)
    if found is None:
        raise _refused(factory, f"default_factory of {name}", "that is not one of Python's own types")
    return found


def _encoded_array(value: Any, name: str) -> tuple[str, Json]:
    dtype = value.dtype
    if dtype.kind not in "biufc" and not hasattr(ml_dtypes, dtype.name):
        raise _refused(value, name, f"of dtype {dtype}")
    kind = "array" if isinstance(value, np.ndarray) else "scalar"
    return kind, [dtype.name, list(np.shape(value)), _text(np.ascontiguousarray(value).tobytes())]


def _fields(value: Any, name: str, encode: Encode) -> Json:
    kind: Any = type(value)
    names = [each.name for each in dataclasses.fields(value)]
    missing = [each for each in names if not hasattr(value, each)]
    if missing or kind.__new__ is not object.__new__ or set(getattr(value, "__dict__", ())) - set(names):
        raise _refused(value, name, "that is more, or less, than the fields of a dataclass")
    return {each: _encoded(getattr(value, each), f"{name}.{each}", encode) for each in names}


def _instance(kind: type[Any], fields: dict[str, Any]) -> Any:
    expected = sorted(each.name for each in dataclasses.fields(kind))
    if sorted(fields) != expected:
        raise InvalidArgumentError(
            f"the state of another worker has a {kind.__qualname__} with fields {sorted(fields)}, expected {expected}"
        )
    made = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def _loaded(module: str, title: str) -> Any:
    """Returns a class that this program has loaded and whose instances can be made without calling it."""
    found = class_named(module, title)
    if found is not None and (
        dataclasses.is_dataclass(found) or issubclass(found, enum.Enum) or hasattr(found, "_fields")
    ):
        return found
    raise InvalidArgumentError(
        f"the state of another worker has an instance of class {title!r} of module {module!r}, which this program has "
        "not loaded; import it before training, or define it where the others do"
    )


def _text(data: Any) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _refused(value: Any, name: str, why: str) -> InvalidArgumentError:
    try:
        shown = repr(value)
    except Exception:
        shown = f"a {type(value).__qualname__}"
    return InvalidArgumentError(
        f"{name} is {shown[:200]}, {why}, which cannot be sent to a worker that joins; expected tensors, numbers, "
        "texts, and lists, dicts and dataclasses of these",
        field=name,
    )


_FLOATS = ("float16", "bfloat16", "float32", "float64")
_BYTES, _TEXT = "bytes", "text"
DATA = "gradserve/data"
"""The key, in the metadata of states on their way, of what has counted of the data of the run."""
_PARTS = {"complex64": "float32", "complex128": "float64"}
"""The component in which tensors of a dtype travel, as numbers of this dtype; those of `_FLOATS` have their own."""
TEXT = DenseSpec("float16", (None,))
"""The component in which a text travels: its bytes in UTF-8."""
COMPONENTS = {_TEXT: TEXT, _BYTES: TEXT} | {dtype: DenseSpec(dtype, (None,)) for dtype in _FLOATS}
"""The components of an accumulator for states, whatever tensors these have: all of a dtype, one after the other."""


@dataclass(frozen=True)
class State:
    """The state that a worker needs to begin where another one is.

    Attributes:
        tensors: Parameters, running averages, the state of an optimizer, by name: arrays of any library in the memory
            of the host, of any dtype of numbers. NumPy arrays in a state that was received.
        metadata: What else there is, the learning rate, for example: numbers and texts, and lists, dicts, tuples, sets,
            Counters, dataclasses and the like of them. It arrives with the same types.
    """

    tensors: Mapping[str, ArrayLike]
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Carried:
    """A copy of a state, as it travels.

    Attributes:
        components: The tensors, by the names of the components of an accumulator.
        layout: The dtype and the shape of each tensor by name, in the order in which they are in the components.
        metadata: The metadata, as JSON has it.
    """

    components: Mapping[str, NDArray[Any]]
    layout: Mapping[str, tuple[str, list[int]]]
    metadata: Json

    @classmethod
    def of(cls, state: State) -> "Carried":
        """Copies a state, whose arrays may change afterwards.

        Raises:
            InvalidArgumentError: A tensor or something in the metadata cannot travel; the message names it.
        """
        metadata = as_json(dict(state.metadata), "metadata")
        arrays = {name: _array(name, tensor) for name, tensor in state.tensors.items()}
        parts: dict[str, list[NDArray[Any]]] = {component: [] for component in COMPONENTS if component != _TEXT}
        for array in arrays.values():
            component, numbers = _numbers(array)
            parts[component].append(numbers)
        return cls(
            {component: _joined(component, each) for component, each in parts.items()},
            {name: (array.dtype.name, list(array.shape)) for name, array in arrays.items()},
            metadata,
        )

    def gradient(self, **more: Json) -> dict[str, NDArray[Any]]:
        """Returns the state as a gradient of an accumulator of COMPONENTS.

        Args:
            more: What else to say of the state.
        """
        text = as_text({"layout": self.layout, "metadata": self.metadata, **more})
        return {**self.components, _TEXT: text}


@dataclass(frozen=True)
class Arrived:
    """A state that another worker has sent.

    Attributes:
        state: The state; the arrays may be read-only.
        layout: The dtype and the shape of each tensor by name.
        said: What else was said of it.
    """

    state: State
    layout: Mapping[str, tuple[str, list[int]]]
    said: Mapping[str, Json]

    @classmethod
    def of(cls, average: Mapping[str, NDArray[Any]]) -> "Arrived":
        """Reads the average of a round with one gradient, which `Carried.gradient` has made.

        Raises:
            InvalidArgumentError: It has something of a class that this program does not have.
        """
        said = of_text(average[_TEXT])
        layout = {name: (dtype, shape) for name, (dtype, shape) in said.pop("layout").items()}
        metadata = from_json(said.pop("metadata"))
        begins = dict.fromkeys(COMPONENTS, 0)
        tensors = {}
        for name, (dtype, shape) in layout.items():
            component, size = _place(np.dtype(dtype), prod(shape))
            begin = begins[component]
            begins[component] = begin + size
            tensors[name] = _tensor(average[component][begin : begin + size], np.dtype(dtype), shape)
        return cls(State(tensors, metadata), layout, said)


def as_text(values: Json) -> NDArray[np.float16]:
    """Returns JSON values as they travel."""
    text = json.dumps(values, separators=(",", ":"))
    return np.frombuffer(text.encode(), np.uint8).astype(np.float16)


def of_text(carried: NDArray[Any]) -> Any:
    """Returns the values of a text."""
    return json.loads(carried.astype(np.uint8).tobytes())


def _array(name: str, tensor: ArrayLike) -> NDArray[Any]:
    if isinstance(tensor, np.ndarray) and hasattr(ml_dtypes, tensor.dtype.name):
        return tensor
    return as_array(tensor, Argument(f"tensors[{name!r}]"))


def _place(dtype: np.dtype[Any], size: int) -> tuple[str, int]:
    """Returns the component in which a tensor of a dtype and a size travels, and as how many numbers."""
    if dtype.name in _FLOATS:
        return dtype.name, size
    if dtype.name in _PARTS:
        return _PARTS[dtype.name], 2 * size
    return _BYTES, dtype.itemsize * size


def _numbers(array: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    """Returns the component in which an array travels, and its numbers: bytes for what is not floating point."""
    component, _ = _place(array.dtype, array.size)
    flat = np.ascontiguousarray(array).reshape(-1)
    return component, flat.view(np.uint8 if component == _BYTES else component)


def _joined(component: str, parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Returns a copy of the numbers of a component. Bytes travel in float16, which has all numbers up to 2048."""
    joined = np.empty(sum(each.size for each in parts), COMPONENTS[component].dtype)
    begin = 0
    for each in parts:
        joined[begin : begin + each.size] = each
        begin += each.size
    return joined


def _tensor(numbers: NDArray[Any], dtype: np.dtype[Any], shape: list[int]) -> NDArray[Any]:
    is_bytes = _place(dtype, 0)[0] == _BYTES
    return (numbers.astype(np.uint8) if is_bytes else np.ascontiguousarray(numbers)).view(dtype).reshape(shape)
