"""A network of a process's own, with nothing but a loopback device in it.

TensorFlow's servers listen on all interfaces and do what anyone asks them to.
In a network namespace (Linux) their ports can be reached by the processes of
that namespace only, neither from other machines nor by others on this one.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys

# From <linux/sched.h>, <linux/sockios.h> and <linux/if.h>.
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS = 0x8913
SIOCSIFFLAGS = 0x8914
IFF_UP = 0x1

# A `struct ifreq`: the name of the device, its flags, and padding.
_REQUEST = "16sh22x"


def enter() -> None:
  """Moves this process, and what it starts from now on, into a new network.

  Root may do so at once. Others do it in a user namespace of their own, where
  they stay who they are. Call it before there are threads.

  Raises:
    OSError: If the system does not allow it.
  """
  if not sys.platform.startswith("linux"):
    raise OSError("only Linux has network namespaces, and `sys.platform` is "
                  f"{sys.platform}")
  try:
    _unshare(CLONE_NEWNET)
  except PermissionError:
    _enter_with_user_namespace()
  _bring_up_loopback()


def _enter_with_user_namespace() -> None:
  user, group = os.geteuid(), os.getegid()
  _unshare(CLONE_NEWUSER | CLONE_NEWNET)
  # The kernel lets no unprivileged process set a group before that.
  _write("setgroups", "deny")
  _write("uid_map", f"{user} {user} 1")
  _write("gid_map", f"{group} {group} 1")


def _unshare(what: int) -> None:
  # `os.unshare` came with Python 3.12.
  if ctypes.CDLL(None, use_errno=True).unshare(what):
    number = ctypes.get_errno()
    error = OSError(number, os.strerror(number))  # `PermissionError` for some.
    raise error


def _write(name: str, text: str) -> None:
  with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
    file.write(text)


def _bring_up_loopback() -> None:
  """Does what `ip link set lo up` does, which need not be installed."""
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
    request = fcntl.ioctl(device, SIOCGIFFLAGS, struct.pack(_REQUEST, b"lo", 0))
    flags = struct.unpack(_REQUEST, request)[1]
    fcntl.ioctl(device, SIOCSIFFLAGS,
                struct.pack(_REQUEST, b"lo", flags | IFF_UP))
