"""An installed cuDNN, asked without a card what convolutions and attention take: off unless the user names one.

NOTE [Asking cuDNN]
Since 9.8 cuDNN makes plans for a card that is only described (``CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR``), and a plan
knows its workspace; cudnn-frontend's sample ``deviceless_aot_compilation.cpp`` shows the way. vramfit ships nothing of
NVIDIA's and keeps no table made from it: `found_library` finds a library that the user has, `asker` starts a process of
its own that loads it (`answering`, through `backend`), and `questions` are what passes between the two. Graphs of
attention are many operations each, and the way to make them is cudnn-frontend's: `found_frontend` finds one that is
installed, `frontend` makes the graphs by it. Answers are kept on the user's disk by version, card and question. A
library that crashes, hangs or knows no answer leaves the question to the rules of ``virtual/kernels``.

cuDNN's licence allows its use "only for use in systems with NVIDIA GPUs" (docs/cudnn.md); whether that fits is for the
user to decide, and so nothing is asked unless ``--cudnn``, ``VRAMFIT_CUDNN`` or ``VirtualGPU(cudnn=...)`` says so.
"""
