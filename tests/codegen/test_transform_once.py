"""The frontend transforms a function once for all values that it captures."""

import ast

import tilelang.language as T

import tileweave  # noqa: F401


def scaled(rows, factor):
    @T.prim_func
    def scaled(A: T.Tensor((rows,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(rows):
                A[i] = A[i] * factor

    return scaled


def test_programs_have_their_own_values():
    for rows, factor in ((32, 3), (64, 5), (96, 7)):
        text = scaled(rows, factor).script()
        assert f"({rows},)" in text and f"* {factor}" in text


def test_a_function_is_transformed_once(monkeypatch):
    scaled(128, 3)

    def parse(*_, **__):
        raise AssertionError("the frontend parses the function again")

    monkeypatch.setattr(ast, "parse", parse)
    scaled(160, 5)
