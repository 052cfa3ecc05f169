"""How many lines of code a kernel has, ours and Triton's."""

import ast
import io
import os
import re
import tokenize

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir)

# The file of our kernel, and the functions of triton_kernels.py that make up theirs.
OURS = {
    "layernorm_residual": "cuda/ops/norm/layernorm_residual.cu",
    "gptq_linear": "cuda/ops/linear/packed/packed.cu",
}
TRITON = {
    "layernorm_residual": ("layernorm_residual_kernel", "layernorm_residual"),
    "gptq_linear": ("gptq_matvec_kernel", "gptq_matvec"),
}


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def cuda_files(path):
    """A kernel's file, and what it includes, directly or not, of its family and of cuda/device. With a header comes the
    .cpp of its name."""
    family = path.split("/")[:3]
    found, left = [], [path]
    while left:
        file = left.pop()
        if file in found:
            continue
        found.append(file)
        includes = re.findall(r'^#include "([^"]+)"', read(file), re.MULTILINE)
        left += [f for f in includes if f.split("/")[:3] == family or f.startswith("cuda/device/")]
        source = os.path.splitext(file)[0] + ".cpp"
        if os.path.exists(os.path.join(ROOT, source)):
            left.append(source)
    return sorted(found)


def lines_of_cuda(text):
    """How many lines of a C++ text are neither blank nor comments alone."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", lambda comment: "\n" * comment.group().count("\n"), text, flags=re.DOTALL)
    return sum(bool(line.strip()) for line in text.split("\n"))


def lines_of_python(text, names):
    """How many lines of a module's functions of these names, with their decorators, are code: neither blank, nor
    comments alone, nor docstrings."""
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            code |= set(range(token.start[0], token.end[0] + 1))
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    counted = set()
    for name in names:
        function = functions[name]
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        lines = set(range(first, function.end_lineno + 1))
        if ast.get_docstring(function) is not None:
            lines -= set(range(function.body[0].lineno, function.body[0].end_lineno + 1))
        counted |= lines & code
    return len(counted)


def our_lines(op):
    """The lines of code of our kernel for an op, as a field of its rows; no field for an op without a Triton row."""
    return {"code_lines": sum(lines_of_cuda(read(file)) for file in cuda_files(OURS[op]))} if op in OURS else {}


def triton_lines(op):
    """The same of Triton's, with the function that launches it."""
    return {"code_lines": lines_of_python(read("apps/peers/triton_kernels.py"), TRITON[op])}
