"""Tests of training on a cluster against one device on the whole batch."""

import json
import pathlib
import time

from absl.testing import absltest
from absl.testing import parameterized
import cluster_cases
import numpy as np
import tensorflow.compat.v1 as tf
import towers
from towers import cluster as cluster_lib

JOBS = {"worker": ["a:1", "b:1"], "ps": ["c:1", "d:1"]}


def assert_close(actual, expected, tolerance=1e-10):
  np.testing.assert_equal(sorted(actual), sorted(expected))
  for name, value in expected.items():
    np.testing.assert_allclose(actual[name], value, rtol=tolerance,
                               atol=tolerance, err_msg=name)


class EquivalenceTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("2_workers", 2, 0, 1), ("2_workers_1_server", 2, 1, 2),
      ("3_workers_2_servers", 3, 2, 1))
  def test_in_graph_equals_one_device(self, workers, servers, devices):
    results = cluster_cases.run_tasks(
        cluster_cases.jobs(workers, servers),
        lambda cluster: cluster_cases.trained(cluster, with_batch_norm=True),
        replication="in_graph", devices=devices)
    assert_close(cluster_cases.values(results, "worker 0"),
                 cluster_cases.on_one_device(with_batch_norm=True))
    others = {name: came for name, came in results.items()
              if name != "worker 0"}
    self.assertEqual(set(others.values()), {"served"})

  @parameterized.named_parameters(
      ("1_worker", 1, 1, 2), ("2_workers_1_server", 2, 1, 2),
      ("3_workers_2_servers", 3, 2, 1))
  def test_between_graph_sync_equals_one_device(self, workers, servers,
                                                devices):
    results = cluster_cases.run_tasks(
        cluster_cases.jobs(workers, servers), cluster_cases.trained,
        devices=devices)
    assert_close(cluster_cases.values(results, "worker 0"),
                 cluster_cases.on_one_device())
    for server in range(servers):
      self.assertEqual(results[f"ps {server}"], "served")
    for worker in range(1, workers):
      self.assertEqual(cluster_cases.values(results, f"worker {worker}"), {})

  def test_clip_norm_and_adam_between_graphs(self):
    make = lambda: tf.train.AdamOptimizer(0.01, epsilon=1e-3)
    results = cluster_cases.run_tasks(
        cluster_cases.jobs(2, 1), lambda cluster: cluster_cases.trained(
            cluster, optimizer=make(), clip_norm=0.3))
    assert_close(
        cluster_cases.values(results, "worker 0"),
        cluster_cases.on_one_device(optimizer=make(), clip_norm=0.3))

  def test_async_trains_all_steps(self):
    results = cluster_cases.run_tasks(
        cluster_cases.jobs(2, 2),
        lambda cluster: cluster_cases.trained(cluster, sync=False))
    found = cluster_cases.values(results, "worker 0")
    # Each worker may have begun one more step when the last was reached.
    self.assertBetween(found["global_step"], cluster_cases.STEPS,
                       cluster_cases.STEPS + 2)
    cluster_cases.values(results, "worker 1")

  def test_inputs_made_on_each_host(self):
    def work(cluster):
      shards = []
      for worker in cluster.workers:
        with tf.device(worker.device()):
          rows = tf.data.Dataset.range(4).map(
              lambda row, worker=worker: tf.cast(row + 10 * worker.index,
                                                 tf.float64)).batch(4)
          shards.append(tf.data.make_one_shot_iterator(rows).get_next())
      graph = towers.build_towers(
          lambda x: {"loss": tf.reduce_mean(
              x * tf.get_variable("w", [], tf.float64,
                                  tf.ones_initializer())), "rows": x},
          cluster.tower_devices, inputs=towers.PerTower(shards),
          parameter_device=cluster.parameter_devices)
      iterators = [op.device for op in graph.graph.get_operations()
                   if op.type == "IteratorGetNext"]
      cluster_cases.global_step(cluster)
      with cluster.session(graph) as session:
        return iterators, session.run([graph.loss, graph.outputs["rows"]])

    results = cluster_cases.run_tasks(cluster_cases.jobs(2, 1), work,
                                      replication="in_graph")
    iterators, (loss, rows) = cluster_cases.values(results, "worker 0")
    self.assertEqual(iterators, ["/job:worker/task:0/device:CPU:0",
                                 "/job:worker/task:1/device:CPU:0"])
    np.testing.assert_allclose(loss, np.mean([*range(4), *range(10, 14)]))
    np.testing.assert_allclose(rows, [*range(4), *range(10, 14)])


class GraphTest(absltest.TestCase):

  def test_between_graph_variables_are_balanced_by_bytes(self):
    cluster = cluster_lib.Cluster(JOBS, job="worker", index=1, devices=2)
    self.assertEqual(cluster.tower_devices,
                     ("/job:worker/task:1/device:CPU:0",
                      "/job:worker/task:1/device:CPU:1"))
    with tf.Graph().as_default():

      def model(x):
        for name, size in (("a", 10), ("b", 4), ("c", 4), ("d", 4)):
          x = x * tf.reduce_sum(tf.get_variable(name, [size]))
        return tf.reduce_mean(x)

      graph = towers.build_towers(
          model, cluster.tower_devices, inputs=tf.ones([4]),
          parameter_device=cluster.parameter_devices)
      train_op = cluster.minimize(
          graph, tf.train.AdamOptimizer(), sync=True,
          global_step=cluster_cases.global_step(cluster))
      places = {place.variable: place.device for place in graph.placement()}
      self.assertEqual(
          [places[name] for name in "abcd"],
          [f"/job:ps/task:{number}/device:CPU:0" for number in (0, 1, 1, 1)])
      for op in graph.graph.get_operations():
        if op.type.startswith(("ResourceApply", "ConditionalAccumulator")):
          self.assertStartsWith(op.device, "/job:ps/")
      self.assertEqual(train_op.device, "/job:worker/task:1/device:CPU:0")
      # What depends on how many workers there are is in no checkpoint.
      names = {v.op.name for v in tf.global_variables()}
      self.assertEqual({name.split("/")[0] for name in names},
                       {"a", "b", "c", "d", "global_step", "beta1_power",
                        "beta2_power"})

  def test_roles(self):
    for replication, job, index, serves, chief in (
        ("in_graph", "worker", 0, False, True),
        ("in_graph", "worker", 1, True, False),
        ("in_graph", "ps", 1, True, False),
        ("between_graph", "worker", 1, False, False),
        ("between_graph", "ps", 0, True, False),
        ("between_graph", "evaluator", 0, False, False)):
      cluster = cluster_lib.Cluster(JOBS, job=job, index=index,
                                    replication=replication)
      self.assertEqual(
          (cluster.only_serves, cluster.is_chief, cluster.is_evaluator),
          (serves, chief, job == "evaluator"), (replication, job, index))
    in_graph = cluster_lib.Cluster({"worker": ["a:1", "b:1"]}, job="worker",
                                   replication="in_graph", devices=["/gpu:1"])
    self.assertEqual(in_graph.tower_devices,
                     ("/job:worker/task:0/device:GPU:1",
                      "/job:worker/task:1/device:GPU:1"))
    self.assertEqual(in_graph.parameter_devices,
                     ("/job:worker/task:0/device:CPU:0",))

  def test_no_run_takes_longer_than_the_time_limit(self):
    for limit, expected in ((2.5, 2500), (float("inf"), 2**31 - 1)):
      cluster = cluster_lib.Cluster(JOBS, job="worker", time_limit=limit)
      with tf.Graph().as_default():
        graph = towers.build_towers(lambda: tf.get_variable("w", []) * 2.0,
                                    cluster.tower_devices)
        for given, value in (({}, expected),
                             ({"operation_timeout_in_ms": 7}, 7)):
          config = cluster._session_config(graph, dict(given))
          self.assertEqual(config.operation_timeout_in_ms, value)

  def test_tf_config(self):
    text = json.dumps({"cluster": JOBS, "task": {"type": "ps", "index": 1}})
    cluster = cluster_lib.Cluster.from_environment(text, devices=1)
    self.assertEqual(str(cluster.task), "ps 1 (d:1)")


class ErrorsTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("replication", dict(replication="both"),
       "`replication` must be one of in_graph, between_graph: got 'both'"),
      ("time_limit", dict(time_limit=0), "`time_limit` must be a number"),
      ("device_of_a_job", dict(devices=["/job:worker/cpu:0"]),
       "`devices` must name one device per tower, without job and task"),
      ("no_server", dict(jobs={"worker": ["a:1", "b:1"]}),
       "`jobs` must hold a parameter server .* got 2 workers and none"),
  )
  def test_arguments(self, arguments, message):
    arguments = dict(arguments)
    with self.assertRaisesRegex(ValueError, message):
      cluster_lib.Cluster(arguments.pop("jobs", JOBS), job="worker",
                          **arguments)

  def test_start_comes_first(self):
    cluster = cluster_lib.Cluster(JOBS, job="ps")
    with self.assertRaisesRegex(ValueError, "`start` must be called before"):
      cluster.serve()

  def test_workers_do_not_only_serve(self):
    cluster = cluster_lib.Cluster(JOBS, job="worker", index=1)
    with self.assertRaisesRegex(
        ValueError, "`serve` must be called in tasks that only serve: got "
        r"worker 1 \(b:1\) with between_graph"):
      cluster.serve()

  def test_variables_that_are_not_shared(self):
    cluster = cluster_lib.Cluster(JOBS, job="worker")
    with tf.Graph().as_default():
      graph = towers.build_towers(
          lambda: tf.get_variable("w", []) * 2.0, cluster.tower_devices)
      with self.assertRaisesRegex(
          ValueError, "resource variables on /job:ps/task:0/device:CPU:0, "
          ".* got w on /job:worker/task:0/device:CPU:0. Pass `parameter_dev"):
        cluster.minimize(graph, tf.train.GradientDescentOptimizer(0.1),
                         global_step=cluster_cases.global_step(cluster))

  def test_options_that_cannot_be_between_graphs(self):
    cluster = cluster_lib.Cluster(JOBS, job="worker")
    with tf.Graph().as_default():
      graph = towers.build_towers(
          lambda: tf.get_variable("w", []) * 2.0, cluster.tower_devices,
          parameter_device=cluster.parameter_devices)
      with self.assertRaisesRegex(
          TypeError, "`options` must be loss, var_list and clip_norm between "
          "graphs with `sync=True`: got accumulate_steps"):
        cluster.minimize(graph, tf.train.GradientDescentOptimizer(0.1),
                         global_step=cluster_cases.global_step(cluster),
                         accumulate_steps=2)

  def test_port_in_use(self):
    addresses = cluster_cases.jobs(1, 1)
    first = cluster_lib.Cluster(addresses, job="ps")
    first.start()
    first.start()  # It has been started.
    with self.assertRaisesRegex(cluster_lib.ClusterError,
                                r"a free port: got ps 0 \(127.0.0.1:"):
      cluster_lib.Cluster(addresses, job="ps").start()


class MissingTest(absltest.TestCase):
  """Nobody waits for ever, and all say for whom."""

  def started(self, addresses, job, index=0, **arguments):
    arguments.setdefault("time_limit", 1.0)
    cluster = cluster_lib.Cluster(addresses, job=job, index=index, **arguments)
    cluster.start()
    return cluster

  def test_c049_missing_server(self):
    addresses = cluster_cases.jobs(1, 1)
    with tf.Graph().as_default(), self.assertRaisesRegex(
        cluster_lib.ClusterError,
        rf"waited 1 s for tasks that are not up: ps 0 \({addresses['ps'][0]}\)"
        ": Connection refused"):
      cluster_cases.trained(self.started(addresses, "worker"))

  def test_c049_missing_chief(self):
    addresses = cluster_cases.jobs(2, 1)
    server = self.started(addresses, "ps")
    with tf.Graph().as_default(), self.assertRaisesRegex(
        cluster_lib.ClusterError,
        r"for the chief to begin: worker 0 \(.*\): Connection refused"):
      cluster_cases.trained(self.started(addresses, "worker", 1))
    with self.assertRaisesRegex(
        cluster_lib.ClusterError,
        r"task to come back: worker 0 \(.*\) has been gone for 1 s \(Connec"):
      server.serve()

  def test_c049_missing_worker(self):
    addresses = cluster_cases.jobs(3, 1)
    self.started(addresses, "ps")
    self.started(addresses, "worker", 1)  # It is up, but trains nothing.
    with tf.Graph().as_default(), self.assertRaisesRegex(
        cluster_lib.ClusterError,
        r"for gradients of worker 1 \(.*\): it is up, but sends nothing, "
        r"worker 2 \(.*\): Connection refused"):
      cluster_cases.trained(self.started(addresses, "worker"))

  def test_c049_missing_worker_in_graph(self):
    addresses = cluster_cases.jobs(2, 0)
    with tf.Graph().as_default(), self.assertRaisesRegex(
        cluster_lib.ClusterError, r"not up: worker 1 \(.*\): Connection"):
      cluster_cases.trained(
          self.started(addresses, "worker", replication="in_graph"))

  def test_c049_any_order_and_others_that_have_ended(self):
    """Worker 1 starts first; worker 0 ends while worker 1 is in a step."""
    starts = {"worker 1": 0.0, "ps 0": 0.4, "worker 0": 0.8}

    def work(cluster):
      time.sleep(starts[f"worker {cluster.task.index}"])
      return cluster_cases.trained(cluster, steps=3)

    results = cluster_cases.run_tasks(cluster_cases.jobs(2, 1), work)
    assert_close(cluster_cases.values(results, "worker 0"),
                 cluster_cases.on_one_device(steps=3))
    self.assertEqual(results["worker 1"], {})
    self.assertEqual(results["ps 0"], "served")

  def test_other_flags_are_named(self):
    addresses = cluster_cases.jobs(2, 1)
    self.started(addresses, "ps")
    for index, size in ((0, 32), (1, 64)):
      cluster = self.started(addresses, "worker", index, time_limit=2.0,
                             facts={"batch_size": size})
      with tf.Graph().as_default(), self.assertRaisesRegex(
          cluster_lib.ClusterError,
          "batch_size is '64' here and '32' at the chief" if index else
          "for gradients of worker 1"):
        cluster_cases.trained(cluster)


class CheckpointTest(parameterized.TestCase):

  def test_c084_any_shape_of_cluster_goes_on(self):
    """10 steps, saved; then 10 more elsewhere equal 20 in one go."""
    shapes = {
        "plain": None, "1_worker": (1, 1, "between_graph", 4),
        "2_workers": (2, 1, "between_graph", 2),
        "3_workers_2_servers": (3, 2, "between_graph", 1),
        "in_graph": (2, 0, "in_graph", 1)}
    folder = pathlib.Path(self.create_tempdir().full_path)
    first = str(folder / "first")
    cluster_cases.values(self.run_shape(shapes["2_workers"], 10, first),
                         "worker 0")
    saved = dict(tf.train.list_variables(tf.train.latest_checkpoint(first)))
    self.assertCountEqual(saved, cluster_cases.on_one_device(steps=0))
    expected = cluster_cases.on_one_device(steps=20)
    for name, shape in shapes.items():
      with self.subTest(name):
        logdir = folder / name
        logdir.mkdir()
        for path in pathlib.Path(first).iterdir():
          if path.name == "checkpoint" or "10" in path.name:
            (logdir / path.name).write_bytes(path.read_bytes())
        if shape is None:
          assert_close(self.go_on_in_plain_code(str(logdir)), expected)
        else:
          results = self.run_shape(shape, 20, str(logdir))
          assert_close(cluster_cases.values(results, "worker 0"), expected)

  def run_shape(self, shape, steps, logdir):
    workers, servers, replication, devices = shape
    return cluster_cases.run_tasks(
        cluster_cases.jobs(workers, servers),
        lambda cluster: cluster_cases.trained(
            cluster, steps=steps, checkpoint_dir=logdir),
        replication=replication, devices=devices)

  def go_on_in_plain_code(self, logdir):
    with tf.Graph().as_default():
      x, y = cluster_cases.placeholders()
      step = tf.train.get_or_create_global_step()
      train_op = tf.train.MomentumOptimizer(0.05, 0.9).minimize(
          cluster_cases.model_fn(False)(x, y), global_step=step)
      with tf.Session() as session:
        path = f"{logdir}/model.ckpt-10"
        tf.train.Saver().restore(session, path)
        for number in range(10, 20):
          session.run(train_op, dict(zip([x, y], cluster_cases.batch(number))))
        return session.run({v.op.name: v for v in tf.global_variables()})


if __name__ == "__main__":
  absltest.main()
