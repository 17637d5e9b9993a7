"""The channel that calls travel on: authenticated messages between a controller and worker processes, over ZeroMQ.

This package knows neither Ray nor workers. It moves bytes, in order, to the holder of a key, and notices lost
connections; ``mcontroller.ray`` decides which values travel in a message.

* A worker process binds two ROUTER sockets (``Endpoint``): one for calls, which its main thread reads itself, and one
  for queries, which a thread answers while a call is running. The main thread needs no other thread to receive a call
  or to answer it: measured on 2 cores, an empty call of one rank takes 0.15 ms, and 0.27 ms if a thread owns the
  socket and hands calls over.
* A controller connects (``Hub``), with one ROUTER socket for all ranks of a group. Several controllers may use the
  same endpoints; ``CallOrder`` is how they agree on one order.
* Whoever waits, polls: the controller has no thread of its own. Among several threads that wait, one polls for all.
* Queries (``ask``, ``notify``) are also how a worker process reads a result that is kept in another one.
* CURVE encrypts every connection. An endpoint accepts one client key, that of its group (``ChannelKeys``).
"""
