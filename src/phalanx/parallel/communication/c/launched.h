// `launched.py`: collectives that are launched are counted, watched and noted.
#pragma once
#include "record.h"

#define IN_GRAPH -1  // instead of a record: what is recorded in a graph happens when that is replayed

static int watched_by(Launches *self, PyObject *axis, PyObject *kind, PyObject *tensor) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->watchers); ++i) {
    PyObject *watcher = Py_NewRef(PyList_GET_ITEM(self->watchers, i));
    PyObject *done = PyObject_CallFunctionObjArgs(watcher, axis, kind, tensor, NULL);
    Py_DECREF(watcher);
    if (!done) return -1;
    Py_DECREF(done);
  }
  return 0;
}

static int add(PyObject *counts, PyObject *key, int64_t more) {
  PyObject *before = PyDict_GetItemWithError(counts, key);
  if (!before && PyErr_Occurred()) return -1;
  PyObject *added = PyLong_FromLongLong(more), *sum = NULL;
  if (added) sum = before ? PyNumber_Add(before, added) : Py_NewRef(added);
  int failed = !sum || PyDict_SetItem(counts, key, sum) < 0;
  Py_XDECREF(added);
  Py_XDECREF(sum);
  return failed ? -1 : 0;
}

// What was counted apart is added to the dicts.
static int settle(Launches *self, Repeated *of) {
  if (!of->calls) return 0;
  int64_t calls = of->calls, sent = of->sent;
  of->calls = of->sent = 0;
  PyObject *key = PyTuple_Pack(2, of->axis, of->kind);
  int failed = !key || add(self->calls, key, calls) < 0 || add(self->sent, key, sent) < 0;
  Py_XDECREF(key);
  return failed ? -1 : 0;
}

static PyObject *settled(Launches *self, void *which) {
  for (int i = 0; i < REPEATED; ++i)
    if (settle(self, &self->repeated[i]) < 0) return NULL;
  return Py_NewRef(which ? self->sent : self->calls);
}

static int count(Repeated *of, int64_t bytes, PyObject *share) {
  int64_t sent;
  if (PyFloat_Check(share)) {
    sent = (int64_t)nearbyint((double)bytes * PyFloat_AS_DOUBLE(share));  // halves to even, as `round` does
  } else {
    int64_t times = PyLong_AsLongLong(share);
    if (times == -1 && PyErr_Occurred()) return -1;
    sent = bytes * times;
  }
  of->sent += sent;
  of->calls++;
  return 0;
}

// What is known of a group and kind. Two that fall into one place take it from each other.
static Repeated *repeated(Launches *self, PyObject *group, PyObject *axis, PyObject *kind) {
  size_t mixed = ((uintptr_t)group >> 4) * 31 + ((uintptr_t)kind >> 4);
  Repeated *found = &self->repeated[(mixed ^ mixed >> 6) % REPEATED];
  if (found->group == group && found->kind == kind && found->axis == axis) return found;
  int number = kind_number(kind);
  if (number < 0 || (found->group && settle(self, found) < 0)) return NULL;
  Py_XSETREF(found->group, Py_NewRef(group));
  Py_XSETREF(found->axis, Py_NewRef(axis));
  Py_XSETREF(found->kind, Py_NewRef(kind));
  found->row = -1;
  found->number = number;
  found->path = (Path){0};
  return found;
}

// Its group has a row in the record from the first collective on that is noted there.
static int has_row(Launches *self, Repeated *of, PyObject *size) {
  if (of->row < 0) of->row = row_of(self->notes, of->group, of->axis, size);
  return of->row >= 0;
}

static PyObject *new_launched(Launches *self, PyObject *axis, PyObject *kind, int64_t record, int cuda) {
  PyObject *since = cuda ? PyObject_CallOneArg(instant, Py_True) : NULL;
  if (cuda && !since) return NULL;
  Launched *made = PyObject_GC_New(Launched, &LaunchedType);
  if (!made) {
    Py_XDECREF(since);
    return NULL;
  }
  made->launches = (Launches *)Py_NewRef(self);
  made->axis = Py_NewRef(axis);
  made->kind = Py_NewRef(kind);
  made->since = since;
  made->waits = made->watched = NULL;
  made->record = record;
  made->cuda = cuda;
  made->main = 0;
  PyObject_GC_Track(made);
  return (PyObject *)made;
}

static PyObject *launches_launched(Launches *self, PyObject *const *given, Py_ssize_t number) {
  if (number != 6) return PyErr_Format(PyExc_TypeError, "6 arguments are taken, not %zd", number);
  PyObject *group = given[0], *axis = given[1], *size = given[2], *kind = given[3], *tensor = given[4];
  int64_t bytes, *signs = self->signs.buf;
  int cuda = to_int(read_attribute(tensor, &is_cuda));
  Repeated *of = cuda < 0 ? NULL : repeated(self, group, axis, kind);
  if (!of) return NULL;
  if (self->in_graph) {
    if ((bytes = bytes_of(tensor)) < 0 || count(of, bytes, given[5]) < 0) return NULL;
    return new_launched(self, axis, kind, IN_GRAPH, cuda);
  }
  if (!has_row(self, of, size)) return NULL;
  int awaited = cuda && self->launching;
  int64_t record = note_launch(self->notes, of->row, of->number, &of->path, tensor, awaited, cuda, &bytes);
  of = record < 0 ? NULL : repeated(self, group, axis, kind);  // Python may have run, and taken its place
  if (!of || count(of, bytes, given[5]) < 0 || watched_by(self, axis, kind, tensor) < 0) return NULL;
  if (awaited) {
    PyObject *called = PyLong_FromLongLong(record);
    PyObject *done = called ? PyObject_CallOneArg(self->launching, called) : NULL;
    Py_XDECREF(called);
    if (!done) return NULL;
    Py_DECREF(done);
  } else {
    signs[0]++;
  }
  return new_launched(self, axis, kind, record, cuda);
}

static PyObject *launches_recorded(Launches *self, PyObject *const *given, Py_ssize_t number) {
  if (number != 5) return PyErr_Format(PyExc_TypeError, "5 arguments are taken, not %zd", number);
  PyObject *group = given[0], *axis = given[1], *size = given[2], *kind = given[3], *tensor = given[4];
  int cuda = to_int(read_attribute(tensor, &is_cuda));
  int received = cuda < 0 ? -1 : PyObject_RichCompareBool(kind, word_receive, Py_EQ);
  if (received < 0 || (received && watched_by(self, axis, kind, tensor) < 0)) return NULL;
  if (self->in_graph) return new_launched(self, axis, kind, IN_GRAPH, cuda);
  Repeated *of = repeated(self, group, axis, kind);
  if (!of || !has_row(self, of, size)) return NULL;
  int64_t record = note_launch(self->notes, of->row, of->number, &of->path, tensor, 0, cuda, NULL);
  return record < 0 ? NULL : new_launched(self, axis, kind, record, cuda);
}

static int launches_init(Launches *self, PyObject *given, PyObject *named) {
  static char *words[] = {"notes", "signs", "launching", "waited", NULL};
  PyObject *notes, *signs, *launching, *waited;
  if (!PyArg_ParseTupleAndKeywords(given, named, "O!OOO", words, &NotesType, &notes, &signs, &launching, &waited))
    return -1;
  if (PyObject_GetBuffer(signs, &self->signs, PyBUF_WRITABLE) < 0) return -1;
  if (self->signs.len < 24) return PyErr_SetString(PyExc_ValueError, "three whole numbers are needed"), -1;
  self->notes = (Notes *)Py_NewRef(notes);
  self->launching = launching == Py_None ? NULL : Py_NewRef(launching);
  self->waited = Py_NewRef(waited);
  self->watchers = PyList_New(0);
  self->wait_watchers = PyList_New(0);
  PyObject *collections = PyImport_ImportModule("collections");
  self->sent = collections ? PyObject_CallMethod(collections, "Counter", NULL) : NULL;
  self->calls = collections ? PyObject_CallMethod(collections, "Counter", NULL) : NULL;
  Py_XDECREF(collections);
  PyObject *thread = self->sent ? PyObject_CallNoArgs(main_thread_of) : NULL;
  PyObject *ident = thread ? PyObject_GetAttrString(thread, "ident") : NULL;
  self->main = ident ? PyLong_AsUnsignedLong(ident) : 0;
  Py_XDECREF(thread);
  Py_XDECREF(ident);
  return PyErr_Occurred() || !self->watchers || !self->wait_watchers ? -1 : 0;
}

static int launches_traverse(Launches *self, visitproc visit, void *arg) {
  Py_VISIT(self->notes);
  Py_VISIT(self->launching);
  Py_VISIT(self->waited);
  Py_VISIT(self->sent);
  Py_VISIT(self->calls);
  Py_VISIT(self->watchers);
  Py_VISIT(self->wait_watchers);
  return 0;
}

static int launches_clear(Launches *self) {
  // who watches is forgotten, and not the list of them, which one that is used after this still reads
  if (self->watchers) PyList_SetSlice(self->watchers, 0, PyList_GET_SIZE(self->watchers), NULL);
  if (self->wait_watchers) PyList_SetSlice(self->wait_watchers, 0, PyList_GET_SIZE(self->wait_watchers), NULL);
  Py_CLEAR(self->launching);
  return 0;
}

static void launches_dealloc(Launches *self) {
  PyObject_GC_UnTrack(self);
  if (self->signs.obj) PyBuffer_Release(&self->signs);
  Py_CLEAR(self->notes);
  Py_CLEAR(self->launching);
  Py_CLEAR(self->waited);
  Py_CLEAR(self->sent);
  Py_CLEAR(self->calls);
  Py_CLEAR(self->watchers);
  Py_CLEAR(self->wait_watchers);
  for (int i = 0; i < REPEATED; ++i) {
    Py_CLEAR(self->repeated[i].group);
    Py_CLEAR(self->repeated[i].axis);
    Py_CLEAR(self->repeated[i].kind);
  }
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef launches_methods[] = {
    {"launched", (PyCFunction)(void (*)(void))launches_launched, METH_FASTCALL, "See the twin."},
    {"recorded", (PyCFunction)(void (*)(void))launches_recorded, METH_FASTCALL, "One that is not counted."},
    {NULL},
};

static PyMemberDef launches_members[] = {
    {"in_graph", T_BOOL, offsetof(Launches, in_graph), 0, NULL},
    {"watchers", T_OBJECT_EX, offsetof(Launches, watchers), READONLY, NULL},
    {"wait_watchers", T_OBJECT_EX, offsetof(Launches, wait_watchers), READONLY, NULL},
    {NULL},
};

static PyGetSetDef launches_counts[] = {
    {"calls", (getter)settled, NULL, NULL, NULL},
    {"sent", (getter)settled, NULL, NULL, "bytes"},
    {NULL},
};

static PyTypeObject LaunchesType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "phalanx_notes.Launches",
    .tp_doc = "All of the communicators that share it; see the twin.",
    .tp_basicsize = sizeof(Launches),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)launches_init,
    .tp_traverse = (traverseproc)launches_traverse,
    .tp_clear = (inquiry)launches_clear,
    .tp_dealloc = (destructor)launches_dealloc,
    .tp_methods = launches_methods,
    .tp_members = launches_members,
    .tp_getset = launches_counts,
};

static PyObject *launched_enter(Launched *self, PyObject *nothing) {
  Launches *launches = self->launches;
  if (PyThread_get_thread_ident() == launches->main) {
    self->main = 1;
    ((int64_t *)launches->signs.buf)[2] = 1;
  }
  if (self->record != IN_GRAPH && note_waiting(launches->notes, self->record) < 0) return NULL;
  if (self->cuda) {
    PyObject *waits = PyObject_CallOneArg(instant, Py_True);
    if (!waits) return NULL;
    Py_XSETREF(self->waits, waits);
  }
  if (PyList_GET_SIZE(launches->wait_watchers)) {
    Py_XSETREF(self->watched, PyObject_CallNoArgs(exit_stack));
    if (!self->watched) return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(launches->wait_watchers); ++i) {
      PyObject *watcher = Py_NewRef(PyList_GET_ITEM(launches->wait_watchers, i));
      PyObject *entered = PyObject_CallFunctionObjArgs(watcher, self->axis, self->kind, NULL);
      PyObject *done = entered ? PyObject_CallMethodOneArg(self->watched, word_enter_context, entered) : NULL;
      Py_DECREF(watcher);
      Py_XDECREF(entered);
      if (!done) return NULL;
      Py_DECREF(done);
    }
  }
  Py_RETURN_NONE;
}

static PyObject *launched_exit(Launched *self, PyObject *const *given, Py_ssize_t number) {
  Launches *launches = self->launches;
  if (number != 3) return PyErr_Format(PyExc_TypeError, "3 arguments are taken, not %zd", number);
  if (self->watched) {
    PyObject *watched = self->watched;
    self->watched = NULL;
    PyObject *done = PyObject_CallMethodObjArgs(watched, word_exit, given[0], given[1], given[2], NULL);
    Py_DECREF(watched);
    if (!done) return NULL;
    Py_DECREF(done);
  }
  if (given[0] == Py_None) {  // where it failed it was never left
    if (self->record != IN_GRAPH && note_left(launches->notes, self->record, self->cuda) < 0) return NULL;
    if (self->cuda) {
      PyObject *ended = PyObject_CallOneArg(instant, Py_True);
      PyObject *waits = self->waits ? self->waits : no_instant;
      PyObject *done =
          ended ? PyObject_CallFunctionObjArgs(launches->waited, self->axis, self->since, waits, ended, NULL) : NULL;
      if (!done) {
        Py_XDECREF(ended);
        return NULL;
      }
      Py_DECREF(done);
      Py_XSETREF(self->since, ended);
    }
  }
  if (self->main) ((int64_t *)launches->signs.buf)[2] = 0;
  Py_RETURN_NONE;
}

static int launched_traverse(Launched *self, visitproc visit, void *arg) {
  Py_VISIT(self->launches);
  Py_VISIT(self->since);
  Py_VISIT(self->waits);
  Py_VISIT(self->watched);
  return 0;
}

static void launched_dealloc(Launched *self) {
  PyObject_GC_UnTrack(self);
  Py_CLEAR(self->launches);
  Py_CLEAR(self->axis);
  Py_CLEAR(self->kind);
  Py_CLEAR(self->since);
  Py_CLEAR(self->waits);
  Py_CLEAR(self->watched);
  PyObject_GC_Del(self);
}

static PyMethodDef launched_methods[] = {
    {"__enter__", (PyCFunction)launched_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))launched_exit, METH_FASTCALL, NULL},
    {NULL},
};

static PyTypeObject LaunchedType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "phalanx_notes.Launched",
    .tp_doc = "Entered while this rank can do nothing but wait for it.",
    .tp_basicsize = sizeof(Launched),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = (traverseproc)launched_traverse,
    .tp_dealloc = (destructor)launched_dealloc,
    .tp_methods = launched_methods,
};
