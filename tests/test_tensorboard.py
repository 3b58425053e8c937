"""Tests of what TensorBoard shows: its graph page in a browser, and its tags.

The page is looked at by Chromium (Debian: chromium and chromium-driver), where
it is installed. With TOWERS_SCREENSHOT=FILE.png, the test of ResNet-110 in
eight towers runs too, and writes what the page looks like.
"""

import importlib.util
import os
import pathlib
import shutil
import time
import unittest

from absl.testing import absltest
from absl.testing import parameterized
import tensorflow.compat.v1 as tf

import testing
import towers
from tools import inspect_graph

BOXES = ["apply", "average", "cross_tower", "gradients", "input", "towers",
         "variables"]

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

# The page consists of components, each with a document of its own inside.
FIND_ALL = """
  const all = [];
  const visit = root => root.querySelectorAll("*").forEach(element => {
    all.push(element);
    if (element.shadowRoot) visit(element.shadowRoot);
  });
  visit(document);
"""
BOXES_SHOWN = FIND_ALL + """
  return all.filter(element => element.matches("g.node.meta")).map(element => [
      element.getAttribute("data-name"),
      getComputedStyle(element.querySelector(".nodeshape > *")).fill]);
"""
EXPAND = FIND_ALL + """
  all.filter(element => element.getAttribute("data-name") === arguments[0])
      .forEach(element => element.querySelector(".buttoncontainer")
          .dispatchEvent(new MouseEvent("click", {bubbles: true})));
"""
CLICK = FIND_ALL + """
  all.filter(element => element.matches(arguments[0])
             && element.textContent.trim() === arguments[1])
      .forEach(element => element.click());
"""
TEXTS = FIND_ALL + """
  return all.filter(element => element.matches(arguments[0])
                    && !element.hasAttribute("disabled"))
      .map(element => element.textContent.trim());
"""


def missing():
  """Returns what the tests with a browser lack; "" if nothing."""
  lacks = [name for name in ("tensorboard", "selenium")
           if importlib.util.find_spec(name) is None]
  lacks += [name for name, path in (
      ("chromium", CHROMIUM), ("chromedriver", DRIVER)) if path is None]
  return f"not installed: {', '.join(lacks)}" if lacks else ""


class Page:
  """TensorBoard in this process, and a browser that shows its graph page."""

  def __init__(self, test, logdir, *, size="1500,900"):
    from selenium import webdriver  # pylint: disable=g-import-not-at-top
    from selenium.webdriver.chrome import service
    from tensorboard import program
    server = program.TensorBoard()
    server.configure(argv=[None, "--logdir", str(logdir), "--port", "0",
                           "--load_fast", "false"])
    url = server.launch()
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu",
                 "--disable-dev-shm-usage", f"--window-size={size}"):
      options.add_argument(flag)
    self.browser = webdriver.Chrome(
        options=options, service=service.Service(DRIVER))
    test.addCleanup(self.browser.quit)
    self.browser.get(f"{url}#graphs")

  def boxes(self, scope=""):
    """Returns the fill colours of the boxes in `scope`, by their names."""
    depth = scope.count("/")
    return {name: fill for name, fill in self.browser.execute_script(
        BOXES_SHOWN)
            if name.startswith(scope) and name.count("/") == depth}

  def has_several_colours(self, scope):
    """Returns the colours of boxes if they differ, else None."""
    found = self.boxes(scope)
    return found if len(set(found.values())) > 1 else None

  def wait(self, function, seconds=30):
    """Returns what `function` does, when that has not changed for a while."""
    end, last, since = time.monotonic() + seconds, None, 0
    while time.monotonic() < end:
      found = function()
      if found and found == last:
        since += 1
        if since > 3:
          return found
      else:
        last, since = found, 0
      time.sleep(0.25)
    raise TimeoutError(f"`function` must settle: got {last} at last.")

  def expand(self, name):
    """Opens a box, and returns the colours of those in it."""
    self.browser.execute_script(EXPAND, name)
    return self.wait(lambda: self.boxes(f"{name}/"))

  def click(self, selector, text=""):
    self.browser.execute_script(CLICK, selector, text)

  def unselect(self):
    self.browser.execute_script(FIND_ALL + """
      all.filter(element => element.matches("svg#svg")).forEach(element =>
          element.dispatchEvent(new MouseEvent("click", {bubbles: true})));
    """)

  def save(self, path):
    """Writes an image of the graph, without the controls beside it."""
    graph, = self.browser.execute_script(
        FIND_ALL + "return all.filter(element => element.matches('svg#svg'));")
    graph.screenshot(path)

  def texts(self, selector):
    return self.browser.execute_script(TEXTS, selector)


@unittest.skipIf(missing(), missing())
class GraphPageTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.create_tempdir())

  def write(self, *arguments):
    values = inspect_graph.make_flags()
    values(["inspect_graph.py", f"--logdir={self.folder}", *arguments])
    inspect_graph.run(values)

  def test_boxes_colours_and_times(self):
    """Of a ResNet in three towers, of which one makes all updates."""
    self.write("--model=resnet8", "--num_towers=3", "--trace")
    page = Page(self, self.folder)
    self.assertEqual(sorted(page.wait(page.boxes)), BOXES)
    for box in ("towers", "gradients"):
      found = page.expand(box)
      found.pop(f"{box}/cross_tower", None)
      self.assertEqual(sorted(found), [f"{box}/tower_{i}" for i in range(3)])
      self.assertLen(set(found.values()), 1)
    self.assertNotIn("Compute time", page.texts("paper-radio-button"))
    page.click("paper-item", "traced_step")
    page.wait(lambda: "Compute time" in page.texts("paper-radio-button"))
    page.click("paper-radio-button", "Compute time")
    # From white to red, by how long the ops of each took.
    colours = page.wait(lambda: page.has_several_colours(""))
    self.assertEqual(sorted(colours), BOXES)
    self.assertIn("Memory", page.texts("paper-radio-button"))

  @unittest.skipUnless(
      os.environ.get("TOWERS_SCREENSHOT"),
      "takes minutes, and is asked for by TOWERS_SCREENSHOT=FILE.png")
  def test_resnet110_in_eight_towers(self):
    self.write("--model=resnet110", "--num_towers=8")
    page = Page(self, self.folder, size="1900,780")
    self.assertEqual(sorted(page.wait(page.boxes, 120)), BOXES)
    found = page.expand("towers")
    self.assertEqual(sorted(found), [f"towers/tower_{i}" for i in range(8)])
    self.assertLen(set(found.values()), 1)
    page.unselect()  # Else details of a box would hide others.
    page.click("paper-button", "Fit to screen")
    time.sleep(3)  # Until it has moved.
    page.save(os.environ["TOWERS_SCREENSHOT"])


class TagsTest(parameterized.TestCase):

  def tags(self, sess, summaries):
    """Returns the values of `summaries` by their tags, each once."""
    values = tf.Summary.FromString(sess.run(tf.summary.merge(summaries))).value
    self.assertLen({value.tag for value in values}, len(values))
    return {value.tag: value for value in values}

  def model(self, x):
    loss = tf.reduce_mean(x)
    tf.summary.scalar("loss", loss)
    with tf.name_scope("layer"):
      tf.summary.histogram("x", x)
    tf.summary.image("image", tf.reshape(x, [-1, 2, 2, 1]), max_outputs=1)
    tf.summary.scalar("own", loss, collections=["own"])
    return loss

  @parameterized.product(num_towers=(1, 2, 3, 4), batch_size=(5, 8))
  def test_are_those_of_the_plain_model(self, num_towers, batch_size):
    """c071: first: each tag once, whose value is tower 0's."""
    x = tf.reshape(tf.range(4.0 * batch_size), [batch_size, 4])
    with tf.Graph().as_default(), testing.session() as sess:
      self.model(tf.ones([batch_size, 4]))
      expected = self.tags(sess, tf.get_collection(tf.GraphKeys.SUMMARIES))
    with tf.Graph().as_default(), testing.session() as sess:
      x = tf.reshape(tf.range(4.0 * batch_size), [batch_size, 4])
      graph = towers.build_towers(
          self.model, testing.devices(num_towers), inputs=x)
      found = self.tags(sess, tf.get_collection(tf.GraphKeys.SUMMARIES))
      self.assertEqual(found.keys(), expected.keys())
      self.assertEqual(list(found), ["loss", "layer/x", "image/image"])
      self.assertAlmostEqual(found["loss"].simple_value,
                             sess.run(graph.towers[0].loss))
      self.assertLen(tf.get_collection("own"), 1)

  @parameterized.parameters(2, 3)
  def test_of_all_towers_on_request(self, num_towers):
    """c071: all: tags and contents differ, own collections' too."""
    with tf.Graph().as_default(), testing.session() as sess:
      x = tf.reshape(tf.range(24.0), [6, 4])
      graph = towers.build_towers(
          self.model, testing.devices(num_towers), inputs=x)
      for key, count in ((tf.GraphKeys.SUMMARIES, 3), ("own", 1)):
        found = self.tags(
            sess, [s for t in graph.towers for s in t.collection(key)])
        self.assertLen(found, count * num_towers)
      images = self.tags(sess, [
          s for t in graph.towers
          for s in t.collection(tf.GraphKeys.SUMMARIES) if "image" in s.name])
      contents = {v.image.encoded_image_string for v in images.values()}
      self.assertLen(images, num_towers)
      self.assertLen(contents, num_towers)

  def test_of_two_builds_stay_apart(self):
    """c072: curves of training and evaluation never share a tag."""
    with tf.Graph().as_default(), testing.session() as sess:
      x = tf.ones([6, 4])
      first = towers.build_towers(self.model, testing.devices(2), inputs=x)
      second = towers.build_towers(
          self.model, testing.devices(2), inputs=x, name="eval")
      one, two = (self.tags(sess, graph.towers[0].collection(
          tf.GraphKeys.SUMMARIES)) for graph in (first, second))
      self.assertEqual(list(one), ["loss", "layer/x", "image/image"])
      self.assertLen(two, len(one))
      self.assertNoCommonElements(one, two)

  def test_of_a_scope_entered_again(self):
    """c072: the tags of one block have the plain model's groups."""
    def twice(x):
      for reuse in (False, True):
        with tf.variable_scope("m", reuse=reuse):
          x = x * tf.get_variable("w", [])
          tf.summary.scalar("average", tf.reduce_mean(x))
      return tf.reduce_mean(x)

    found = []
    for num_towers in (0, 1, 3):
      with tf.Graph().as_default(), testing.session() as sess:
        if num_towers:
          towers.build_towers(twice, testing.devices(num_towers),
                              inputs=tf.ones([6, 4]))
        else:
          twice(tf.ones([6, 4]))
        sess.run(tf.global_variables_initializer())
        found.append(sorted(self.tags(
            sess, tf.get_collection(tf.GraphKeys.SUMMARIES))))
    self.assertEqual(found, [["m/average", "m_1/average"]] * 3)


if __name__ == "__main__":
  absltest.main()
