"""Tests for tools.streams."""

import io
import os
import pathlib

from absl.testing import absltest
from absl.testing import parameterized

from tools import streams


class OutputTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.read, self.write = os.pipe()
    self.addCleanup(os.close, self.write)
    self.output = streams.Output(self.write)

  def written(self):
    while self.output.waiting:
      self.output.write_some()
    return os.read(self.read, 65536)

  def test_writes_in_order(self):
    self.output.add(b"one\n")
    self.output.add(b"")
    self.output.add_line("two")
    self.assertEqual(self.output.waiting, 8)
    self.assertEqual(self.written(), b"one\ntwo\n")
    os.close(self.read)

  def test_line_below_an_unfinished_one(self):
    self.output.add(b"\r50%")
    self.output.add_line("message")
    self.output.add_line("and more \udcff")
    self.assertEqual(self.written(), b"\r50%\nmessage\nand more \\udcff\n")
    os.close(self.read)

  def test_writes_no_more_at_once_than_a_pipe_takes(self):
    self.output.add(bytes(3 * streams.CHUNK))
    self.output.write_some()
    self.assertEqual(self.output.waiting, 2 * streams.CHUNK)
    self.output.drop()
    self.assertEqual(self.output.waiting, 0)
    os.close(self.read)

  def test_reader_that_has_gone(self):
    os.close(self.read)
    self.output.add(b"one")
    self.output.write_some()
    self.assertEqual(self.output.waiting, 0)
    self.output.add(b"two")
    self.assertEqual(self.output.waiting, 0)


class TeeTest(absltest.TestCase):

  def tee(self, log):
    self.read, write = os.pipe()
    self.addCleanup(os.close, self.read)
    self.addCleanup(os.close, write)
    tee = streams.Tee(log, streams.Output(write))
    self.addCleanup(tee.close)
    return tee

  def test_log_and_output_get_the_same(self):
    log = io.BytesIO()
    tee = self.tee(log)
    self.assertFalse(tee.read_some())  # It does not wait.
    os.write(tee.child_descriptor, b"\r50%")
    self.assertTrue(tee.read_some())
    self.assertEqual(log.getvalue(), b"\r50%")
    self.assertEqual(tee.output.waiting, 4)
    tee.close_child_end()
    self.assertFalse(tee.read_some())
    self.assertIsNone(tee.descriptor)
    self.assertFalse(tee.is_ready)

  def test_is_not_ready_while_much_waits(self):
    tee = self.tee(io.BytesIO())
    self.assertTrue(tee.is_ready)
    tee.output.add(bytes(streams.MAX_WAITING))
    self.assertFalse(tee.is_ready)
    tee.close_child_end()

  @absltest.skipUnless(os.path.exists("/dev/full"), "There is no /dev/full.")
  def test_full_log_does_not_end_the_rest(self):
    with open("/dev/full", "wb", buffering=0) as log:
      tee = self.tee(log)
      for data in (b"one\n", b"two\n"):
        os.write(tee.child_descriptor, data)
        self.assertTrue(tee.read_some())
    tee.output.write_some()
    self.assertEqual(
        os.read(self.read, 4096),
        b"`/dev/full` takes no more (No space left on device).\none\ntwo\n")
    tee.close_child_end()


class LastLineTest(parameterized.TestCase):

  def last_line(self, data, start=0):
    path = pathlib.Path(self.create_tempdir().full_path, "log")
    path.write_bytes(data)
    return streams.last_line(str(path), start)

  @parameterized.named_parameters(
      ("one", b"one\ntwo\n", "two"),
      ("without_newline", b"one\ntwo", "two"),
      ("blank", b"one\n  \n\n", "one"),
      ("bar", b" 10%\r 20%\r 30%", "30%"),
      ("colours", b"\x1b[31mred\x1b[0m\n\x1b[K\n", "red"),
      ("bytes", b"a\xff\x00b", "a\ufffd b"),
      ("long", b"a" * 99999 + b"b", "a" * 299 + "b"),
      ("none", b"", "no output"),
  )
  def test_last_line(self, data, expected):
    self.assertEqual(self.last_line(data), expected)

  def test_start(self):
    self.assertEqual(self.last_line(b"old\n", 4), "no output")
    self.assertEqual(self.last_line(b"old\nnew\n", 4), "new")

  def test_no_file(self):
    self.assertEqual(streams.last_line("/no/such/log"), "no output")


if __name__ == "__main__":
  absltest.main()
