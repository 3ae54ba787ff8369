"""Stands for cudnn-frontend's compiled module: keeps what a graph is made of, and refuses where a test wants."""

from types import SimpleNamespace

data_type = SimpleNamespace(BFLOAT16="bf16", HALF="f16", FLOAT="f32", INT64="i64")
heur_mode = SimpleNamespace(A="A")
tensor_reordering = SimpleNamespace(NONE="none")
graphs = []
refusal = ""


class cudnnGraphNotSupportedError(Exception):
    pass


class tensor:
    def __init__(self, **about):
        self.__dict__.update(about)

    def set_output(self, output):
        self.output = output
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def _set_data_type(self, kind):
        self.data_type = kind
        return self


def _set_dlhandle_cudnn(handle):
    assert handle


def create_device_properties(text):
    return text


class pygraph:
    def __init__(self, **about):
        self.about, self.calls = about, []
        graphs.append(self)

    def _make_tensor(self, **about):
        return tensor(**about)

    def sdpa(self, **given):
        self.given, self.outputs = given, [tensor(), tensor() if given["generate_stats"] else None]
        return self.outputs

    def sdpa_backward(self, **given):
        self.given, self.outputs = given, [tensor(), tensor(), tensor()]
        return self.outputs

    def validate(self):
        self.calls.append("validate")

    def build_operation_graph(self):
        self.calls.append("build_operation_graph")

    def create_execution_plans(self, modes):
        self.calls.append(("create_execution_plans", *modes))

    def check_support(self):
        if refusal:
            raise cudnnGraphNotSupportedError(refusal)
        self.calls.append("check_support")

    def build_plans(self):
        self.calls.append("build_plans")

    def get_workspace_size(self):
        return 12345
