"""Tests for tools.private_network."""

import os
import re
import socket
import sys
from unittest import mock

from absl.testing import absltest

import process_cases
from tools import private_network

# Enters a network, and talks with itself there.
CODE = """
import os, socket, sys
from tools import private_network
{change}
before = os.geteuid(), os.readlink("/proc/self/ns/net")
private_network.enter()
with socket.create_server(("127.0.0.1", 0)) as server:
  with socket.create_connection(server.getsockname()):
    pass
print(os.geteuid() == before[0],
      os.readlink("/proc/self/ns/net") != before[1])
try:
  socket.create_connection(("127.0.0.1", int(sys.argv[1])))
  print("reached")
except ConnectionRefusedError:
  print("refused")
"""

# How a traceback ends where the system says no.
REFUSED = re.compile(r"\n(PermissionError|OSError): \[Errno \d+\] .*\n$")


def enter(change=""):
  """Returns the process that tried."""
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    # The same, in the network of this process.
    socket.create_connection(server.getsockname()).close()
    return process_cases.run("-c", CODE.format(change=change), port)


class PrivateNetworkTest(absltest.TestCase):

  def check(self, result):
    if REFUSED.search(result.stderr):
      self.skipTest("This system allows no private network: "
                    f"{result.stderr.splitlines()[-1]}")
    self.assertEqual((result.stdout, result.stderr),
                     ("True True\nrefused\n", ""))

  def test_holds_loopback_and_reaches_nothing_else(self):
    self.check(enter())

  def test_with_a_user_namespace(self):
    """As for users who are not root."""
    self.check(enter(
        "unshare = private_network._unshare\n"
        "def refuse(what):\n"
        "  if what == private_network.CLONE_NEWNET:\n"
        "    raise PermissionError(1, 'Operation not permitted')\n"
        "  unshare(what)\n"
        "private_network._unshare = refuse\n"))

  def test_other_systems(self):
    with mock.patch.object(sys, "platform", "darwin"), \
        self.assertRaisesRegex(OSError, "only Linux has .* is darwin"):
      private_network.enter()

  @absltest.skipUnless(sys.platform.startswith("linux"), "Only on Linux.")
  def test_error_of_the_system(self):
    """What makes no sense is refused whoever asks."""
    with self.assertRaisesRegex(OSError, os.strerror(22)):
      private_network._unshare(-1)


if __name__ == "__main__":
  absltest.main()
