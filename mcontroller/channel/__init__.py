"""The channel that calls travel on: authenticated messages between a controller and worker processes.

This package knows neither Ray nor workers. It moves bytes, in order, to the holder of a key, and notices lost
connections; ``mcontroller.ray`` decides which values travel in a message.

* A worker process binds two ROUTER sockets (``Endpoint``): one for calls, which its main thread reads itself, and one
  for queries, which a thread answers while a call is running.
* A controller connects (``Hub``), with one ROUTER socket for all ranks of a group. Several controllers may use the
  same endpoints; ``CallOrder`` is how they agree on one order.
* The thread that waits for a call polls the sockets. If several wait, one polls for all.
* Queries (``ask``, ``notify``) are also how a worker process reads a result that is kept in another one.
* On one machine, sockets are files in a folder that only the user can enter. Between machines, CURVE encrypts TCP, and
  an endpoint accepts one client key, the key of its group (``ChannelKeys``).
* There is no relay between a controller and the ranks of a node: docs/results.md has the figures and the reasons.
"""
