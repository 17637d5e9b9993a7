"""The channel that calls travel on: authenticated messages between a controller and worker processes, over ZeroMQ.

This package knows neither Ray nor workers. It moves bytes, in order, to the holder of a key, and notices lost
connections; ``mcontroller.ray`` decides which values travel in a message.

* A worker process binds two ROUTER sockets (``Endpoint``): one for calls, which its main thread reads itself, and one
  for queries, which a thread answers while a call is running. So the main thread needs no other thread to receive a
  call or to answer it: 54 us for one rank and an empty answer, on 2 cores.
* A controller connects (``Hub``), with one ROUTER socket for all ranks of a group. Several controllers may use the
  same endpoints; ``CallOrder`` is how they agree on one order.
* The thread that waits polls the sockets: the controller has no thread of its own. If several wait, one polls for all.
* Queries (``ask``, ``notify``) are also how a worker process reads a result that is kept in another one.
* CURVE encrypts every connection. An endpoint accepts one client key, that of its group (``ChannelKeys``).
* There is no relay between a controller and the ranks of a node yet. With light endpoints on 2 cores, the controller
  uses 18 to 30 us per rank and call up to 1,024 ranks, and 66 us at 4,096; behind relays of 64 ranks that cost nothing
  themselves it would use 1 us (``benchmarks/scale.py``). So a relay pays from a few hundred ranks on.
"""
