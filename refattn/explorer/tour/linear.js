// Linear algebra of small matrices, lists of rows, for numbers that a formula does not reach: what solves an equation,
// singular values and vectors, a basis. Plain numbers; a quantity has them as its `values`.

const range = (count) => Array.from({ length: count }, (_, n) => n);
const total = (list) => list.reduce((past, x) => past + x, 0);
const product = (a, b) => a.map((row) => b[0].map((_, n) => total(row.map((x, l) => x * b[l][n]))));
const transposed = (a) => a[0].map((_, n) => a.map((row) => row[n]));
const squares = (a) => total(a.flat().map((x) => x * x));

// A list whose entries are made when they are asked for, once.
const lazily = (make) => new Proxy({}, { get: (kept, n) => (kept[n] ??= make(Number(n))) });

// The x with `rows` x = right, by elimination.
function solve(rows, right) {
  const all = rows.map((row, n) => [...row, right[n]]), size = all.length;
  for (let n = 0; n < size; n += 1) {
    const best = range(size).slice(n).reduce((p, r) => (Math.abs(all[r][n]) > Math.abs(all[p][n]) ? r : p), n);
    [all[n], all[best]] = [all[best], all[n]];
    for (let r = n + 1; r < size; r += 1) {
      const times = all[r][n] / all[n][n];
      for (let p = n; p <= size; p += 1) all[r][p] -= times * all[n][p];
    }
  }
  const found = [];
  for (let n = size - 1; n >= 0; n -= 1) found[n] = (all[n][size] - range(size).slice(n + 1).reduce((past, p) => past + all[n][p] * found[p], 0)) / all[n][n];
  return found;
}

// Singular values, largest first, and vectors as columns: turn pairs of columns until all are at right angles.
function svd(a) {
  const left = transposed(a), right = range(left.length).map((n) => range(left.length).map((l) => (n === l ? 1 : 0)));
  for (let sweep = 0; sweep < 60; sweep += 1) {
    let turned = 0;
    for (let m = 0; m < left.length; m += 1) for (let n = m + 1; n < left.length; n += 1) {
      const [mm, nn, mn] = [[m, m], [n, n], [m, n]].map(([e, f]) => total(left[e].map((x, l) => x * left[f][l])));
      if (Math.abs(mn) <= 1e-15 * Math.sqrt(mm * nn) || mn === 0) continue;
      turned += 1;
      const z = (nn - mm) / (2 * mn), t = Math.sign(z || 1) / (Math.abs(z) + Math.hypot(1, z)), cos = 1 / Math.hypot(1, t), sin = t * cos;
      for (const of of [left, right]) [of[m], of[n]] = [of[m].map((x, l) => cos * x - sin * of[n][l]), of[m].map((x, l) => sin * x + cos * of[n][l])];
    }
    if (!turned) break;
  }
  const sizes = left.map((column) => Math.hypot(...column)), order = range(sizes.length).sort((m, n) => sizes[n] - sizes[m]);
  const unit = order.map((n) => left[n].map((x) => (sizes[n] > 0 ? x / sizes[n] : 0)));
  return { left: transposed(unit), values: order.map((n) => sizes[n]), right: transposed(order.map((n) => right[n])) };
}

// Eigenvalues of a symmetric positive matrix, the smallest first, and eigenvectors as columns with a largest part that is positive.
function eigen(a) {
  const { values, right } = svd(a), columns = transposed(right).reverse().map((column) => {
    const most = column.reduce((best, x) => (Math.abs(x) > Math.abs(best) ? x : best), 0);
    return column.map((x) => x * Math.sign(most));
  });
  return { values: values.reverse(), vectors: transposed(columns) };
}

// An orthonormal basis of the columns, as rows: Gram and Schmidt, twice against rounding.
function basis(columns, first = []) {
  const made = [...first];
  for (const column of columns) {
    let rest = column;
    for (let again = 0; again < 2; again += 1) for (const one of made) {
      const along = total(one.map((x, n) => x * rest[n]));
      rest = rest.map((x, n) => x - along * one[n]);
    }
    const size = Math.hypot(...rest);
    if (size > 1e-9 * Math.hypot(...column)) made.push(rest.map((x) => x / size));
  }
  return made;
}

// The matrix with its `width` largest singular values alone.
function nearest(a, width) {
  const { left, values, right } = svd(a);
  return a.map((_, m) => a.map((__, n) => total(range(width).map((r) => left[m][r] * values[r] * right[n][r]))));
}

