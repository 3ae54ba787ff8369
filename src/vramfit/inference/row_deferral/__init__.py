"""Large results that exist only some rows at a time: attention scores, and what feed-forward layers hold in between.

NOTE [Deferred rows]: a product that is much larger than its factors (queries with keys, the first layer of a
feed-forward part) gives a `DeferredRows` in its place: a tensor with the shape and dtype of the result, and the recipe
for any of its rows. What treats each row by itself (scaling, masks, softmax over the columns, activations) lengthens
the recipe; a product that takes the rows and gives little of each (weights with values, the second layer) computes it,
some rows at a time, into an output that was allocated once. Anything else gets the whole, computed by the calls that
the program made, and is the plain program from there on. Nothing in the model is known by name, so that hand-written
attention is reached as well as a library's.
"""

from __future__ import annotations

from vramfit.inference.row_deferral.row_chunking import InRowChunks as InRowChunks
from vramfit.inference.row_deferral.row_chunking import RowChunks as RowChunks
from vramfit.inference.row_deferral.row_chunking import row_chunks as row_chunks
