// The same as `notes.py` and `launched.py`, without Python's instructions: what a rank notes of each collective and each
// phase. Compiled by `compiled_notes.py`, which gives the numbers of the record's layout. What is seldom done, a group or
// a place that is new, is Python's (`places.py`).
#include "launched.h"
#include "record.h"

static PyObject *notes_doing(Notes *self, PyObject *phase) {
  int64_t now, *current = numbers_at(self, NOW_AT);
  PyObject *number = PyDict_GetItemWithError(phases, phase);
  if (!number) {
    if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, phase);
    return NULL;
  }
  if (read_clock(self, &now) < 0) return NULL;
  int before = self->phase;
  self->phase = (int)PyLong_AsLong(number);
  ((int64_t *)self->spent.buf)[before] += now - self->since;
  self->since = now;
  if (self->phase && (!self->has_summed || self->summed != self->step) && begin_step(self) < 0) return NULL;
  current[DOING] = self->phase;
  current[SINCE] = now;
  current[STEP] = self->step;
  Record record = {.launched = now, .kind = PHASE, .number = ++self->count};
  record.step = (uint32_t)self->step;
  record.phase = (uint8_t)self->phase;
  write_record(self, &record);
  return Py_NewRef(PyTuple_GET_ITEM(phase_names, before));
}

static PyObject *notes_launched(Notes *self, PyObject *given, PyObject *named) {
  static char *words[] = {"group", "axis", "size", "kind", "tensor", "awaited", NULL};
  PyObject *group, *axis, *size, *kind, *tensor;
  int awaited = 0;
  if (!PyArg_ParseTupleAndKeywords(given, named, "OOOOO|p", words, &group, &axis, &size, &kind, &tensor, &awaited))
    return NULL;
  Path path = {0};
  int cuda = to_int(read_attribute(tensor, &is_cuda));
  int row = cuda < 0 ? -1 : row_of(self, group, axis, size), number = row < 0 ? -1 : kind_number(kind);
  if (number < 0) return NULL;
  int64_t record = note_launch(self, row, number, &path, tensor, awaited, cuda, NULL);
  return record < 0 ? NULL : PyLong_FromLongLong(record);
}

static PyObject *notes_arrived(Notes *self, PyObject *given) {
  int64_t record = PyLong_AsLongLong(given), now;
  if (record == -1 && PyErr_Occurred()) return NULL;
  Record *place = record_of(self, record / GROUPS);
  if (place->number == record / GROUPS) {
    if (read_clock(self, &now) < 0) return NULL;
    place->arrived = now;
    came(self, record % GROUPS, place->sequence);
  }
  Py_RETURN_NONE;
}

static PyObject *notes_waiting(Notes *self, PyObject *given) {
  int64_t record = PyLong_AsLongLong(given);
  if ((record == -1 && PyErr_Occurred()) || note_waiting(self, record) < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *notes_left(Notes *self, PyObject *given, PyObject *named) {
  static char *words[] = {"record", "on_gpu", NULL};
  long long record;
  int on_gpu = 0;
  if (!PyArg_ParseTupleAndKeywords(given, named, "L|p", words, &record, &on_gpu)) return NULL;
  if (note_left(self, record, on_gpu) < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *notes_on_device(Notes *self, PyObject *given) {
  long long spent, waited;
  if (!PyArg_ParseTuple(given, "LL", &spent, &waited)) return NULL;
  self->sums_of_step[ON_DEVICE] = spent;
  self->sums_of_step[DEVICE_WAITED] = waited;
  Py_RETURN_NONE;
}

static int whole_numbers(PyObject *sums, const char *name, Py_buffer *view, Py_ssize_t count) {
  PyObject *found = PyObject_GetAttrString(sums, name);
  int failed = !found || PyObject_GetBuffer(found, view, PyBUF_WRITABLE) < 0;
  Py_XDECREF(found);
  if (!failed && view->len != 8 * count) {
    PyErr_Format(PyExc_ValueError, "%s: %zd bytes", name, view->len);
    failed = 1;
  }
  return failed ? -1 : 0;
}

static int notes_init(Notes *self, PyObject *given, PyObject *named) {
  static char *words[] = {"memory", "places", "sums", "clock", NULL};
  PyObject *memory, *clock = Py_None;
  if (!PyArg_ParseTupleAndKeywords(given, named, "OOO|O", words, &memory, &self->places, &self->sums, &clock)) {
    self->places = self->sums = NULL;
    return -1;
  }
  Py_INCREF(self->places);
  Py_INCREF(self->sums);
  self->clock = clock == Py_None ? NULL : Py_NewRef(clock);
  self->groups = PyObject_GetAttrString(self->places, "groups");
  if (!self->groups || PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0) return -1;
  if (self->memory.len != BYTES) {
    PyErr_Format(PyExc_ValueError, "%zd bytes are no flight record", self->memory.len);
    return -1;
  }
  if (whole_numbers(self->sums, "spent", &self->spent, MOST_PHASES) < 0 ||
      whole_numbers(self->sums, "waited", &self->waited, MOST_PHASES) < 0 ||
      whole_numbers(self->sums, "along", &self->along, GROUPS) < 0 ||
      whole_numbers(self->sums, "beside", &self->beside, GROUPS) < 0)
    return -1;
  self->processor = to_int(PyObject_GetAttrString(self->sums, "processor"));
  self->sums_of_step = numbers_at(self, STEPS_AT);
  if (PyErr_Occurred()) return -1;
  self->room = 1024;
  self->entries = PyMem_Calloc(self->room, sizeof(Entry));
  if (!self->entries) return PyErr_NoMemory(), -1;
  self->main = PyThread_get_thread_ident();
  return read_clock(self, &self->since);
}

static int notes_traverse(Notes *self, visitproc visit, void *arg) {
  Py_VISIT(self->places);
  Py_VISIT(self->sums);
  Py_VISIT(self->clock);
  Py_VISIT(self->groups);
  return 0;
}

static int notes_clear(Notes *self) {
  Py_CLEAR(self->clock);  // the only one through which anything could lead back here
  return 0;
}

static void notes_dealloc(Notes *self) {
  PyObject_GC_UnTrack(self);
  Py_buffer *views[] = {&self->memory, &self->spent, &self->waited, &self->along, &self->beside};
  for (size_t i = 0; i < sizeof(views) / sizeof(*views); ++i)
    if (views[i]->obj) PyBuffer_Release(views[i]);
  Py_CLEAR(self->places);
  Py_CLEAR(self->sums);
  Py_CLEAR(self->clock);
  Py_CLEAR(self->groups);
  PyMem_Free(self->entries);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef notes_methods[] = {
    {"doing", (PyCFunction)notes_doing, METH_O, "This rank begins with something; what it did before."},
    {"launched", (PyCFunction)(void (*)(void))notes_launched, METH_VARARGS | METH_KEYWORDS, "See the twin."},
    {"arrived", (PyCFunction)notes_arrived, METH_O, "The GPU has come to a collective."},
    {"waiting", (PyCFunction)notes_waiting, METH_O, "From now on a collective is waited for."},
    {"on_device", (PyCFunction)notes_on_device, METH_VARARGS, "What the clock of a GPU says of steps."},
    {"left", (PyCFunction)(void (*)(void))notes_left, METH_VARARGS | METH_KEYWORDS, "And now not any more."},
    {NULL},
};

static PyMemberDef notes_members[] = {
    {"step", T_LONGLONG, offsetof(Notes, step), 0, "The one that runs."},
    {NULL},
};

static PyTypeObject NotesType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "phalanx_notes.Notes",
    .tp_doc = "Of one rank; see the twin.",
    .tp_basicsize = sizeof(Notes),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)notes_init,
    .tp_traverse = (traverseproc)notes_traverse,
    .tp_clear = (inquiry)notes_clear,
    .tp_dealloc = (destructor)notes_dealloc,
    .tp_methods = notes_methods,
    .tp_members = notes_members,
};

// The module.

static PyObject *of_module(const char *module, const char *name) {
  PyObject *from = PyImport_ImportModule(module);
  PyObject *found = from ? PyObject_GetAttrString(from, name) : NULL;
  Py_XDECREF(from);
  return found;
}

static int read_item_sizes(void) {
  PyObject *dtype, *number;
  for (Py_ssize_t at = 0; PyDict_Next(dtypes, &at, &dtype, &number);) {
    int size = to_int(PyObject_GetAttrString(dtype, "itemsize"));
    if (size < 0) return -1;
    item_sizes[PyLong_AsLong(number) & 255] = size;
  }
  return 0;
}

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "phalanx_notes", .m_size = -1};

PyMODINIT_FUNC PyInit_phalanx_notes(void) {
  const char *twin = "phalanx.parallel.communication.notes";
  struct {
    PyObject **to;
    const char *module, *name;
  } needed[] = {
      {&kinds, twin, "KIND_NUMBERS"},         {&dtypes, twin, "DTYPE_NUMBERS"},
      {&phases, twin, "PHASE_NUMBERS"},       {&phase_names, "phalanx.flight", "PHASES"},
      {&exit_stack, "contextlib", "ExitStack"}, {&getframe, "sys", "_getframe"},
      {&main_thread_of, "threading", "main_thread"},
      {&compiled_frames, "phalanx.parallel.torch_private", "compiled_frames"},
      {&compile_seconds, "phalanx.parallel.torch_private", "compile_seconds"},
      {&instant, "phalanx.parallel.communication.instants", "now"},
      {(PyObject **)&tensor_type, "torch", "Tensor"},
  };
  for (size_t i = 0; i < sizeof(needed) / sizeof(*needed); ++i)
    if (!(*needed[i].to = of_module(needed[i].module, needed[i].name))) return NULL;
  struct {
    PyObject **to;
    const char *text;
  } words[] = {
      {&word_nbytes, "nbytes"},       {&word_owner, "owner"},
      {&word_new_site, "new_site"},   {&word_new_group, "new_group"}, {&word_enter_context, "enter_context"},
      {&word_exit, "__exit__"},       {&word_receive, "receive"},
  };
  for (size_t i = 0; i < sizeof(words) / sizeof(*words); ++i)
    if (!(*words[i].to = PyUnicode_InternFromString(words[i].text))) return NULL;
  if (find_attribute(&shape_of) < 0 || find_attribute(&dtype_of) < 0 || find_attribute(&is_cuda) < 0) return NULL;
  if (!(no_instant = PyFloat_FromDouble(0.0)) || read_item_sizes() < 0) return NULL;
  if (PyType_Ready(&NotesType) < 0 || PyType_Ready(&LaunchesType) < 0 || PyType_Ready(&LaunchedType) < 0) return NULL;
  PyObject *module = PyModule_Create(&definition);
  if (!module || PyModule_AddObjectRef(module, "Notes", (PyObject *)&NotesType) < 0 ||
      PyModule_AddObjectRef(module, "Launches", (PyObject *)&LaunchesType) < 0)
    return NULL;
  return module;
}
