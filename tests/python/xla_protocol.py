# SPDX-License-Identifier: Apache-2.0
"""The function that XLA calls on GPUs, called as XLA does, on the GPU that is none (fake_gpu.py): by `test_jax_gpu`.

`python xla_protocol.py CHECK` runs one of the functions without arguments.
"""

from __future__ import annotations

import ctypes
import sys

from fake_gpu import gpu  # first: the driver that Tessera opens
from tessera import _core

Size, Pointer, Integer = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int64
BF16, S32, S64 = 16, 4, 5
STREAM = 0x5150
INVALID_ARGUMENT, UNIMPLEMENTED = 3, 12


def struct(name, *fields):
    """Each begins with its size, and with a pointer to extensions but for spans and arrays."""
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


HEAD = (("bytes", Size), ("extensions", Pointer))
Buffer = struct("Buffer", *HEAD, ("type", ctypes.c_int), ("data", Pointer), ("rank", Integer), ("dims", Pointer))
Items = struct("Items", *HEAD, ("size", Integer), ("kinds", Pointer), ("items", Pointer))
Span = struct("Span", ("data", ctypes.c_char_p), ("size", Size))
Numbers = struct("Numbers", ("type", ctypes.c_int), ("size", Size), ("data", Pointer))
Attributes = struct("Attributes", *HEAD, ("size", Integer), ("kinds", Pointer), ("names", Pointer), ("items", Pointer))
Version = struct("Version", *HEAD, ("major", ctypes.c_int), ("minor", ctypes.c_int))
MakeError = struct("MakeError", *HEAD, ("message", ctypes.c_char_p), ("code", ctypes.c_int))
GetMessage = struct("GetMessage", *HEAD, ("failure", Pointer), ("message", ctypes.c_char_p))
GetStream = struct("GetStream", *HEAD, ("context", Pointer), ("stream", Pointer))
Allocate = struct("Allocate", *HEAD, ("context", Pointer), ("size", Size), ("alignment", Size), ("data", Pointer))
Free = struct("Free", *HEAD, ("context", Pointer), ("size", Size), ("data", Pointer))
GetOrdinal = struct("GetOrdinal", *HEAD, ("context", Pointer), ("ordinal", ctypes.c_int32))
POINTERS = "internal make_error get_message destroy_error register get_stream register_type get_context set_state "
POINTERS += "get_state allocate free schedule thread_count make_future set_available set_failed get_run_id get_ordinal"
Api = struct("Api", *HEAD, ("version", Version), *((name, Pointer) for name in POINTERS.split()))
Frame = struct(
    "Frame",
    *HEAD,
    ("api", Pointer),
    ("context", Pointer),
    ("stage", ctypes.c_int),
    ("arguments", Items),
    ("results", Items),
    ("attributes", Attributes),
)

Call = ctypes.CFUNCTYPE(Pointer, Pointer)
ctypes.pythonapi.PyCapsule_GetPointer.restype = Pointer
ctypes.pythonapi.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
RUN = Call(ctypes.pythonapi.PyCapsule_GetPointer(_core.ffi_handlers()[1], b"xla._CUSTOM_CALL_TARGET"))


class Xla:
    """XLA's side of calls, which it keeps account of."""

    def __init__(self):
        self.errors, self.allocated, self.freed, self.kept = [], [], [], []
        self.most_bytes, self.own_errors = 1 << 40, [b""]
        self.api = Api(bytes=ctypes.sizeof(Api))
        for name in ("make_error", "get_message", "destroy_error", "get_stream", "allocate", "free", "get_ordinal"):
            function = Call(getattr(self, name))
            self.kept.append(function)
            setattr(self.api, name, ctypes.cast(function, Pointer))

    def make_error(self, at):
        made = MakeError.from_address(at)
        self.errors.append((made.code, made.message.decode()))
        return 1

    def get_stream(self, at):
        GetStream.from_address(at).stream = STREAM

    def get_message(self, at):
        told = GetMessage.from_address(at)
        told.message = self.own_errors[told.failure]

    def destroy_error(self, at):
        pass

    def fail(self, message):
        self.own_errors.append(message)
        return len(self.own_errors) - 1

    def allocate(self, at):
        asked = Allocate.from_address(at)
        if asked.alignment > 16:  # as XLA says, whose memory has that of its allocator all the same, and no more
            return self.fail(b"Unsupported alignment")
        if asked.size > self.most_bytes:
            return self.fail(b"Out of memory")
        memory = ctypes.create_string_buffer(asked.size + 512)
        self.kept.append(memory)
        address = ctypes.addressof(memory)
        asked.data = address + -address % 256 + 16 * len(self.allocated)
        self.allocated.append((asked.size, asked.data))

    def free(self, at):
        given = Free.from_address(at)
        self.freed.append((given.size, given.data))

    def get_ordinal(self, at):
        GetOrdinal.from_address(at).ordinal = 0

    def array(self, kind, values):
        made = (kind * max(1, len(values)))(*values)
        self.kept.append(made)
        return ctypes.addressof(made)

    def buffers(self, shapes):
        made = []
        for shape, dtype in shapes:
            count = 1
            for size in shape:
                count *= size
            memory = ctypes.create_string_buffer(count * (2 if dtype == BF16 else 4) + 256)
            self.kept.append(memory)
            data = ctypes.addressof(memory) + -ctypes.addressof(memory) % 256
            made.append(Buffer(ctypes.sizeof(Buffer), None, dtype, data, len(shape), self.array(Integer, shape)))
        self.kept.append(made)
        pointers = [ctypes.addressof(each) for each in made]
        kinds = self.array(ctypes.c_int32, [1] * len(made))
        return Items(ctypes.sizeof(Items), None, len(made), kinds, self.array(Pointer, pointers))

    def call(self, problem, arguments, results, inputs, outputs, scalars=(0, 0, 0, 0, 0)):
        """Whether it failed."""
        texts = {"problem": problem, "wishes": "", "inputs": inputs, "outputs": outputs}
        items = [Span(text.encode(), len(text)) for text in texts.values()]
        items.append(Numbers(S64, len(scalars), self.array(Integer, scalars)))
        names = [Span(name.encode(), len(name)) for name in (*texts, "scalars")]
        self.kept += [items, names]
        attributes = Attributes(
            ctypes.sizeof(Attributes),
            None,
            len(items),
            self.array(ctypes.c_int32, [4] * len(texts) + [1]),
            self.array(Pointer, [ctypes.addressof(each) for each in names]),
            self.array(Pointer, [ctypes.addressof(each) for each in items]),
        )
        api = ctypes.addressof(self.api)
        frame = Frame(
            ctypes.sizeof(Frame), None, api, None, 3, self.buffers(arguments), self.buffers(results), attributes
        )
        return bool(RUN(ctypes.addressof(frame)))


ROWS = ((2, 64, 4, 64), BF16)
DENSE = "attention b=2 sq=64 hq=4 d=64 dtype=bf16 causal"


def check_queued_on_the_stream():
    """A launch on XLA's stream, again without compiling; nobody waits, and nothing is allocated but by XLA."""
    xla = Xla()
    assert not xla.call(DENSE, [ROWS] * 3, [ROWS], "q k v", "o"), xla.errors
    assert gpu.launches == 1 and gpu.last.stream == STREAM
    modules, allocations, before = gpu.modules, gpu.allocations, gpu.synchronisations
    assert not xla.call(DENSE, [ROWS] * 3, [ROWS], "q k v", "o")
    assert gpu.launches == 2 and gpu.modules == modules
    assert (gpu.synchronisations, gpu.allocations) == (before, allocations) == (0, allocations)
    assert xla.freed == xla.allocated


def check_workspace_of_xla():
    """A backward, which needs one: of XLA's allocator, given back at the end of the call."""
    xla = Xla()
    problem = DENSE.replace("attention", "attention pass=backward")
    lse = ((2, 4, 64), 11)
    arguments = [ROWS, ROWS, ROWS, ROWS, lse, ROWS]
    assert not xla.call(problem, arguments, [ROWS] * 3, "q k v o lse dout", "dq dk dv"), xla.errors
    assert len(xla.allocated) == 1 and xla.allocated[0][0] > 0
    assert xla.freed == xla.allocated and gpu.launches > 0 and gpu.synchronisations == 0
    assert not xla.call(problem, arguments, [ROWS] * 3, "q k v o lse dout", "dq dk dv"), xla.errors
    assert xla.allocated[1][1] % 256 == 16 and xla.freed == xla.allocated
    launches, xla.most_bytes = gpu.launches, 1000
    assert xla.call(problem, arguments, [ROWS] * 3, "q k v o lse dout", "dq dk dv")
    assert "XLA_FFI_DeviceMemory_Allocate: got Out of memory" in xla.errors[-1][1] and gpu.launches == launches


def check_refusals():
    """Errors are XLA's, with Tessera's words."""
    xla = Xla()
    assert xla.call(DENSE, [ROWS, ROWS, ((2, 3, 4, 64), BF16)], [ROWS], "q k v", "o")
    assert xla.errors[-1][0] == INVALID_ARGUMENT and xla.errors[-1][1].startswith("v: got bf16 (2, 3, 4, 64)")
    plain = ((2, 64, 4, 64), 11)
    assert xla.call(DENSE.replace("bf16", "fp32"), [plain] * 3, [plain], "q k v", "o")
    assert xla.errors[-1][0] == UNIMPLEMENTED
    assert gpu.launches == 0 and xla.freed == xla.allocated


def check_positions_as_words():
    """Pairs of uint32 are int64 there, and `-` is bound nowhere."""
    xla = Xla()
    arguments = [ROWS, ROWS, ROWS, ((2, 2), 8), ROWS]
    assert not xla.call(DENSE, arguments, [ROWS], "q k v q_offset:int64 -", "o"), xla.errors
    assert xla.call(DENSE, [*arguments[:3], ((2, 3), 8), ROWS], [ROWS], "q k v q_offset:int64 -", "o")
    assert "uint32" in xla.errors[-1][1]


if __name__ == "__main__":
    globals()[sys.argv[1]]()
