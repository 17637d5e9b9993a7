"""Router replay: the experts that a mixture of experts has chosen for tokens are recorded, and chosen again later.

``routers`` is what Megatron's routers ask, ``rows`` has the experts of the rows of a batch (``TokenBatch.experts``) in
generation, training and scoring, and ``replay`` is what an actor does with them.
"""
