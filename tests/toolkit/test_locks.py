"""A lock refuses every caller except those that it names."""

import json
import json.encoder
import operator
import sys
import types

import pytest

from brigade.rank import locks


class Holder:
    secret = locks.hidden_attribute()

    @locks.private
    def work(self):
        return "worked"


@pytest.fixture
def trusted(monkeypatch):
    """Trust this file during the test."""
    monkeypatch.setattr(locks, "_trusted", {id(globals()): globals()})


def run_as_stranger(source, **names):
    """Run code in its own namespace."""
    exec(source, namespace := {"__name__": "brigade.rank.recording", **names})
    return namespace.get("found")


def test_hidden_attributes_answer_to_trusted_code_only(trusted):
    one, other = Holder(), Holder()
    one.secret = 1
    assert one.secret == 1 and not hasattr(other, "secret")
    assert vars(one) == {} and type(one) is Holder
    for look in (
        "holder.secret",
        "getattr(holder, 'secret')",
        "operator.attrgetter('secret')(holder)",
        "type(holder).secret.fget(holder)",
        "holder.secret = 2",
        "holder.work()",
        "type(holder).work.fget(holder)",
    ):
        with pytest.raises(AttributeError, match="no such"):
            run_as_stranger(look, holder=one, operator=operator)
    assert one.secret == 1 and one.work() == "worked"


def test_private_methods_are_not_replaced_in_an_object(trusted):
    holder = Holder()
    with pytest.raises(AttributeError):
        holder.work = lambda: "stolen"
    vars(holder)["work"] = lambda: "stolen"
    assert holder.work() == "worked"


def test_sealed_classes_are_changed_by_trusted_code_only(trusted):
    class Closed(metaclass=locks.make_sealed_metaclass(object)):
        pass

    Closed.answer = 1
    for change in ("closed.answer = 2", "del closed.answer", "setattr(closed, 'answer', 2)"):
        with pytest.raises(AttributeError, match="Closed belongs to the grader"):
            run_as_stranger(change, closed=Closed)
    assert Closed.answer == 1


def test_an_own_copy_is_not_changed_with_the_module(monkeypatch):
    copy = locks.copy_module("json.encoder")
    monkeypatch.setattr(json.encoder.JSONEncoder, "encode", lambda self, value: "forged")
    monkeypatch.setattr(json.encoder, "JSONEncoder", None)
    assert copy.JSONEncoder().encode({"a": 1.5}) == '{"a": 1.5}'


def test_reserved_functions_refuse_with_a_sentence(trusted):
    module = types.ModuleType("module")
    exec("def work(): return 'worked'\ndef user(): return work()", vars(module))
    code = locks.CodeOf(module)
    locks.reserve(module, "work", "only some may", users=code)
    assert module.work() == "worked" and module.user() == "worked"
    with pytest.raises(RuntimeError, match="only some may"):
        run_as_stranger("module.work()", module=module)
    with pytest.raises(RuntimeError, match="only some may"):  # in the user's namespace, but not its code
        exec(compile("work()", "module.py", "exec"), vars(module))
    with pytest.raises(RuntimeError, match="only some may"):  # the user's code, in another namespace
        types.FunctionType(module.user.__code__, {"work": module.work})()


def test_code_of_a_module_is_known_by_its_objects():
    code = locks.CodeOf(locks)
    with pytest.raises(ModuleNotFoundError, match="belongs to the grader") as error:
        locks.NotForSubmissions({"brigade"}).find_spec("brigade.rank.recording")
    assert error.tb.tb_next.tb_frame in code
    assert sys._getframe() not in code
    equal = {}
    exec(compile("def frame(): return sys._getframe()", locks.__file__, "exec"), {**vars(locks)}, equal)
    assert equal["frame"]() not in code


def test_hidden_packages_cannot_be_imported(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    package, part = types.ModuleType("a_package"), types.ModuleType("a_package.part")
    package.part = part  # as an import does
    monkeypatch.setitem(sys.modules, "a_package", package)
    monkeypatch.setitem(sys.modules, "a_package.part", part)
    locks.hide_packages({"a_package"})
    assert not [name for name in sys.modules if name.startswith("a_package")]
    with pytest.raises(ModuleNotFoundError, match="a_package.part belongs to the grader|a_package belongs"):
        import a_package.part  # noqa: F401
