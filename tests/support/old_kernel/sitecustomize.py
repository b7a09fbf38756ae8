"""On the path of a process, this makes its kernel one without pidfds: older than 5.3, or a container that forbids them.

A seccomp filter answers the two system calls with ENOSYS, here and in all that is started from here.
"""

import ctypes
import struct

_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD_NUMBER, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ENOSYS = 0x7FFF0000, 0x00050000 | 38
_REFUSED = (424, 434)  # pidfd_send_signal, pidfd_open


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def _refuse() -> None:
    code = struct.pack("=HBBI", _LOAD_NUMBER, 0, 0, 0)
    for number in _REFUSED:
        code += struct.pack("=HBBI", _EQUAL, 0, 1, number) + struct.pack("=HBBI", _RETURN, 0, 0, _ENOSYS)
    code += struct.pack("=HBBI", _RETURN, 0, 0, _ALLOW)
    kept = ctypes.create_string_buffer(code)
    program = _Program(len(code) // 8, ctypes.cast(kept, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "the filter was not taken")


_refuse()
