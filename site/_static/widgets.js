/* What explore.js and toys.js share: elements, sliders, and numbers with labels. */
"use strict";

const widgets = (() => {
  /** Return a new element with attributes and text. Names that begin with "svg:" are SVG elements. */
  function make(name, attributes = {}, text = null) {
    const element = name.startsWith("svg:")
      ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
      : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    return element;
  }

  /** Replace the content of an element by numbers: lists of a name, a label and a value. */
  function showNumbers(element, numbers) {
    element.replaceChildren(...numbers.map(([name, label, value]) => {
      const pair = make("div");
      pair.append(make("span", {}, label), make("strong", {"data-name": name}, value));
      return pair;
    }));
  }

  /** Add a slider over `values` to an element. Call `onInput` with the new value whenever the slider moves. */
  function addSlider(element, {name, label, values, first, unit = ""}, onInput) {
    const row = element.appendChild(make("label", {}, label));
    const output = make("output");
    const slider = make("input", {type: "range", name, min: 0, max: values.length - 1, value: values.indexOf(first)});
    const show = () => {
      output.textContent = `${values[slider.value]} ${unit}`.trim();
      slider.setAttribute("aria-valuetext", output.textContent);
    };
    slider.addEventListener("input", () => {
      show();
      onInput(values[slider.value]);
    });
    show();
    row.append(slider, output);
  }

  return {make, showNumbers, addSlider};
})();
