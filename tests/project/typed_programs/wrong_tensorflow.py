"""Mistakes in the use of ``horoplug.tensorflow`` and ``horoplug.keras``."""

import tensorflow as tf

import horoplug.keras
import horoplug.tensorflow as hvd

x = tf.ones(3)
hvd.allreduce(x, op="sum")  # wrong
hvd.allredcue(x)  # wrong
hvd.grouped_allreduce(3)  # wrong
hvd.broadcast(x)  # wrong
hvd.rank() + ""  # wrong
horoplug.keras.callbacks.MetricAveragesCallback()  # wrong
horoplug.keras.broadcast_global_variables("0")  # wrong
horoplug.keras.DistributedOptimizer(x, compression="fp16")  # wrong
